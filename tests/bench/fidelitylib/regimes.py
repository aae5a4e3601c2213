"""Where people work: models, lengths, samplers and guidance that methods are compared in."""

from __future__ import annotations

from dataclasses import dataclass

from demo_pack import captions

MODELS = {"flux": "Flux", "unet": "SDXL's UNet", "student": "4-step student of Flux"}
PIXELS = {1024: 128, 4096: 256}  # side of the demo models' image by its tokens
ADDS_NOISE = ("dpmpp_2m_sde", "euler_ancestral")
MOST_PROMPTS = 32  # one subject each: half of what the models know


@dataclass(frozen=True)
class Regime:
    """One way to sample. `speeds` are the speed-ups that rivals are asked for; without any, only ONE_TOLERANCE is
    drawn. `decides`: part of --quick."""

    name: str
    model: str
    steps: int
    sampler: str
    scheduler: str
    cfg: float
    speeds: tuple[float, ...] = ()
    tokens: int = 1024
    decides: bool = False

    @property
    def family(self) -> str:
        """Which full-size model stands behind it, for FLOPs."""
        return "unet" if self.model == "unet" else "flux"

    @property
    def kind(self) -> str:
        """Which settings a preset has for it."""
        return "unet" if self.model == "unet" else "dit"

    @property
    def adds_noise(self) -> bool:
        return self.sampler in ADDS_NOISE

    def describe(self) -> str:
        size = "" if self.tokens == 1024 else f", {self.tokens} tokens"
        return f"{MODELS[self.model]}, {self.sampler}/{self.scheduler}, cfg {self.cfg:g}, {self.steps} steps{size}"


_LONG, _USUAL, _EIGHT, _FOUR = (1.8, 2.5, 3.5, 5.0), (1.4, 1.8, 2.5, 3.5), (1.25, 1.6, 2.0), (1.33, 2.0)
_NOISY = (1.25, 1.5, 2.0)


def _flux(steps: int, speeds: tuple[float, ...], **more) -> Regime:
    name = f"flux-{steps}" + (f"-{more['tokens']}" if "tokens" in more else "")
    return Regime(name, "flux", steps, "euler", "simple", 1.0, speeds, **more)


REGIMES = [
    _flux(20, _USUAL, decides=True),
    _flux(28, _USUAL),
    _flux(50, _LONG),
    _flux(8, _EIGHT, decides=True),
    _flux(4, _FOUR),
    Regime("student-4", "student", 4, "euler", "simple", 1.0, _FOUR, decides=True),
    Regime("unet-sde-25", "unet", 25, "dpmpp_2m_sde", "karras", 6.0, _NOISY, decides=True),
    Regime("unet-2m-25", "unet", 25, "dpmpp_2m", "karras", 6.0, _USUAL, decides=True),
    Regime("unet-ancestral-25", "unet", 25, "euler_ancestral", "simple", 6.0, _NOISY),
    Regime("unet-euler-20", "unet", 20, "euler", "simple", 2.5, _USUAL),
    Regime("unet-euler-8", "unet", 8, "euler", "simple", 2.5, _EIGHT),
    Regime("unet-euler-4", "unet", 4, "euler", "simple", 2.5, _FOUR),
    _flux(20, (1.8,), tokens=4096),
    Regime("unet-sde-25-4096", "unet", 25, "dpmpp_2m_sde", "karras", 6.0, (1.5,), tokens=4096),
    # other lengths and samplers, for whether one tolerance means one closeness
    *(_flux(steps, ()) for steps in (12, 30)),
    *(Regime(f"unet-euler-{steps}", "unet", steps, "euler", "simple", 2.5) for steps in (12, 30, 50)),
    *(
        Regime(f"{model}-{sampler}-20", model, 20, sampler, "simple", cfg)
        for model, cfg in (("flux", 1.0), ("unet", 2.5))
        for sampler in ("dpmpp_2m", "heun", "dpmpp_2m_sde", "euler_ancestral")
    ),
]
ONE_TOLERANCE = "quality"  # the preset whose tolerance is looked at over all lengths and samplers
BY_NAME = {regime.name: regime for regime in REGIMES}


def prompts(count: int, held_out: bool) -> list[str]:
    """Presets are chosen on one half of the subjects, figures in the docs are of the other."""
    subjects = sorted(captions.SUBJECTS)[1 if held_out else 0 :: 2]
    colours = list(captions.COLOURS)
    return [f"{subjects[i % len(subjects)]} on {colours[i * 5 % len(colours)]}" for i in range(count)]
