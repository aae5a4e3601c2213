"""ComfyUI's conditioning hooks: a LoRA that is switched on in the middle of a run, by the nodes for it."""

import builders
import composing
import pytest
import torch

RUN = {"width": 128, "height": 128, "steps": 6, "cfg": 2.0}
NEVER, LATE, ALWAYS = (
    [(0.0, 0.0)],
    [(0.0, 0.0), (1.0, 0.5)],
    [(1.0, 0.0)],
)  # (strength, from this part of the run on)


def node(name: str, **inputs):
    import nodes

    kind = nodes.NODE_CLASS_MAPPINGS[name]
    return getattr(kind(), kind.FUNCTION)(**inputs)[0]


def with_lora(bench, name: str, frames: list[tuple[float, float]]) -> list:
    """A prompt whose LoRA follows these keyframes."""
    file = bench.file("loras", name, bench.lora)
    hooks, schedule = node("CreateHookLora", lora_name=file, strength_model=1.0, strength_clip=0.0), None
    for strength, start in frames:
        schedule = node("CreateHookKeyframe", strength_mult=strength, start_percent=start, prev_hook_kf=schedule)
    hooks = node("SetHookKeyframes", hooks=hooks, hook_kf=schedule)
    prompt = builders.conditioning(bench.models[name], 1)
    about = {"strength": 1.0, "set_cond_area": "default", "hooks": hooks}
    return node("ConditioningSetProperties", cond_NEW=prompt, **about)


def sample(bench, name: str, model, frames: list[tuple[float, float]]) -> list[torch.Tensor]:
    """What the model made of each step, and the picture."""
    made = []
    last = builders.sample(
        model,
        **RUN,
        positive=with_lora(bench, name, frames),
        callback=lambda _, x0, *__: made.append(x0.clone()),
    )
    return [*made, last]


def first_apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    return next((step for step, (x, y) in enumerate(zip(a, b)) if composing.far(x, y) > 1e-5), len(a))


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_a_scheduled_lora_acts_on_its_schedule(bench, figure, name):
    model, merged = bench.models[name], bench.toma(bench.models[name])
    before = builders.sample(model, **RUN)
    never, late, always = (sample(bench, name, model, frames) for frames in (NEVER, LATE, ALWAYS))
    switched = first_apart(never, late)
    assert 0 < switched < RUN["steps"] and first_apart(never, always) == 0
    assert composing.far(late[-1], never[-1]) > 10 * composing.NEGLIGIBLE, "the LoRA does too little to be seen"

    toma_never, toma_late, toma_always = (sample(bench, name, merged, frames) for frames in (NEVER, LATE, ALWAYS))
    report = merged.model_options["toma"].reports[-2]
    assert report.tokens and all(after < all_ for all_, after in report.tokens.values())
    assert first_apart(toma_never, toma_late) == switched and first_apart(toma_never, toma_always) == 0
    for theirs, ours in ((late, toma_late), (always, toma_always)):
        effect, merged_effect = theirs[-1] - never[-1], ours[-1] - toma_never[-1]
        alike = torch.nn.functional.cosine_similarity(effect.flatten(), merged_effect.flatten(), dim=0)
        assert alike > composing.LEAST_COSINE, f"the LoRA points elsewhere: {alike:.2f}"
    figure(f"LoRA by hooks, {name}", f"on from step {switched + 1} of {RUN['steps']}, merged or not")
    assert torch.equal(builders.sample(model, **RUN), before), "the hooks or ToMA left something on the model"


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_with_ratio_0_a_scheduled_lora_is_the_same_to_the_bit(bench, name):
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    off = patch(bench.models[name], Settings(ratio=0.0, skip_first_blocks=0))
    plain, same = (sample(bench, name, model, LATE) for model in (bench.models[name], off))
    assert all(torch.equal(a, b) for a, b in zip(plain, same))
