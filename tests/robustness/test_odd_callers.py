"""Other nodes that call a model in ways of their own (issue 21): none fails because of us, the image is right, and the
run says what it did or why it did nothing."""

import types
from contextlib import contextmanager

import builders
import pytest
import torch
from calling import FORECAST, MERGED, RUN, guided, node, says_what_it_did, told, toma
from composing import far


def euler(answer_of=lambda answer: answer):
    def sampler(model, x, sigmas, extra_args=None, callback=None, disable=None):
        for i in range(len(sigmas) - 1):
            clean = answer_of(model(x, sigmas[i] * x.new_ones(len(x)), **extra_args))
            x = x + (sigmas[i + 1] - sigmas[i]) * (x - clean) / sigmas[i]
        return x

    return sampler


def prompts(model) -> dict:
    return {"positive": builders.conditioning(model, 1), "negative": builders.conditioning(model, 2)}


# --------------------------------------------------------------------------- who asks the guider


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_an_answer_that_is_a_tuple(bench, name):
    """LanPaint's guider gives two latents."""
    import comfy.samplers

    class Two(comfy.samplers.CFGGuider):
        def predict_noise(self, *args, **kwargs):
            clean = super().predict_noise(*args, **kwargs)
            return clean, clean * 0.5

    def run(model):
        guider = Two(model)
        guider.set_conds(**prompts(model))
        guider.set_cfg(2.0)
        return guided(guider, euler(lambda answer: answer[0]), model)

    patched = toma(bench.models[name], **FORECAST)
    assert torch.equal(run(patched), run(bench.models[name]))
    assert not told(patched).counts["forecast"] and "answer is not a latent" in "; ".join(told(patched).notes)
    says_what_it_did(told(patched))


def flow_edit(labelled: bool, both_at_first: bool, gradients: bool):
    """Two latents at a time, of which only the difference of the answers counts. One may ask for gradients."""

    def sampler(model, x, sigmas, extra_args=None, callback=None, disable=None):
        edited, ones = x.clone(), x.new_ones(len(x))
        for i in range(len(sigmas) - 1):
            answers = []
            for which, latent in (("source", x), ("target", edited)):
                if which == "source" and i == 0 and not both_at_first:
                    answers.append(torch.zeros_like(x))
                    continue
                options = extra_args["model_options"]
                options["transformer_options"]["latent_type" if labelled else "_"] = which if labelled else None
                latent = (latent * (1.0 if which == "source" else 1.02)).detach()
                latent.requires_grad_(gradients and which == "target")
                answers.append(model(latent, sigmas[i] * ones, **extra_args))
            edited = edited + (sigmas[i + 1] - sigmas[i]) * (answers[0] - answers[1])
        return edited.detach()

    return sampler


@pytest.mark.parametrize(
    "how", [(True, True, False), (True, False, False), (False, True, False), (True, True, True), (False, False, True)]
)
def test_two_latents_at_a_time(bench, how):
    """A history of one says nothing of the other: as without ToMA, to the bit."""
    import comfy.samplers

    class Guider(comfy.samplers.CFGGuider):
        def predict_noise(self, x, timestep, model_options=None, seed=None):
            which = model_options["transformer_options"].get("latent_type")
            cond = self.conds["negative" if which == "source" else "positive"]
            return comfy.samplers.sampling_function(
                self.inner_model, x, timestep, None, cond, 1.0, model_options=model_options, seed=seed
            )

    def run(model):
        guider = Guider(model)
        guider.set_conds(**prompts(model))
        return guided(guider, flow_edit(*how), model)

    patched = toma(bench.models["flux"], ratio=0.0, tolerance=0.9)
    assert torch.equal(run(patched), run(bench.models["flux"]))
    assert not told(patched).counts["forecast"]
    says_what_it_did(told(patched))


def test_every_latent_asks_for_gradients(bench):
    """As in training: nothing is done, and the one reason that is given is the true one."""

    def sampler(model, x, sigmas, extra_args=None, callback=None, disable=None):
        for sigma in sigmas[:-1]:
            x = model(x.detach().requires_grad_(), sigma * x.new_ones(len(x)), **extra_args)
        return x.detach()

    import comfy.samplers

    patched = toma(bench.models["flux"], **{**MERGED, **FORECAST, "ratio": 0.5})
    guider = comfy.samplers.CFGGuider(patched)
    guider.set_conds(**prompts(patched))
    guided(guider, sampler, patched)
    assert told(patched).notes == ["a latent that asks for gradients (as in training) is neither forecast nor merged"]


@pytest.mark.parametrize("where", ["APPLY_MODEL", "DIFFUSION_MODEL"])
@pytest.mark.parametrize("settings", [FORECAST, MERGED], ids=["forecast", "merged"])
def test_a_wrapper_that_answers_some_steps(bench, settings, where):
    """A cache of another pack gives every third answer of the network, or of the model."""
    from comfy.patcher_extension import WrappersMP

    def cached(model):
        model, seen = model.clone(), []

        def wrapper(executor, *args, **kwargs):
            asked[0] += 1
            if seen and asked[0] % 3 == 0:
                return seen[-1].clone()
            seen.append(executor(*args, **kwargs))
            return seen[-1].clone()

        asked = [0]
        model.add_wrapper_with_key(getattr(WrappersMP, where), "cache", wrapper)
        return model

    run = {"steps": 9, "cfg": 1.0}
    alone = builders.sample(cached(bench.models["sdxl"]), **run)
    patched = toma(cached(bench.models["sdxl"]), **settings)
    out = builders.sample(patched, **run)
    assert torch.isfinite(out).all() and far(out, alone) < 0.5
    assert any("another node answered" in evaluated.why for evaluated in told(patched).evaluations)
    says_what_it_did(told(patched))


def test_the_sampling_function_replaced(bench, monkeypatch):
    """AutomaticCFG puts its own in the place of ComfyUI's, for good."""
    import comfy.samplers

    def theirs(model, x, timestep, uncond, cond, cond_scale, model_options={}, seed=None):  # noqa: B006
        positive, negative = comfy.samplers.calc_cond_batch(model, [cond, uncond], x, timestep, model_options)
        return negative + (positive - negative) * cond_scale

    for settings in (FORECAST, MERGED):
        before = builders.sample(toma(bench.models["sdxl"], **settings), **RUN)
        with monkeypatch.context() as replaced:
            replaced.setattr(comfy.samplers, "sampling_function", theirs)
            patched = toma(bench.models["sdxl"], **settings)
            assert far(builders.sample(patched, **RUN), before) < 1e-4
        assert told(patched).counts["forecast"] or told(patched).tokens


# --------------------------------------------------------------------------- who calls the network


@pytest.mark.parametrize("settings", [FORECAST, MERGED], ids=["forecast", "merged"])
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_a_wrapper_that_never_calls_the_model(bench, name, settings):
    """DeepCache runs the network itself: it is forecast all the same, and nothing is merged unsaid."""

    def deep_cache(apply_model, args):
        c = dict(args["c"])
        options = {key: value for key, value in c.pop("transformer_options").items() if key != "wrappers"}
        options["patches_replace"] = {}
        return apply_model.__self__._apply_model(args["input"], args["timestep"], transformer_options=options, **c)

    model = bench.models[name].clone()
    model.set_model_unet_function_wrapper(deep_cache)
    alone, patched = builders.sample(model, **RUN), toma(model, **settings)
    out = builders.sample(patched, **RUN)
    if settings is FORECAST:
        assert told(patched).counts["forecast"] and far(out, alone) < 0.5
    else:
        assert torch.equal(out, alone) and not told(patched).tokens
        assert "in a way of its own" in "; ".join(told(patched).notes)
    says_what_it_did(told(patched))


def foreign_forward(how: str):
    """Flux's forward as packs have written it for themselves."""
    from comfy.ldm.flux.layers import timestep_embedding

    def forward_orig(self, img, img_ids, txt, txt_ids, timesteps, y, guidance, control, *given, **rest):
        options = dict(given[0] if given else rest["transformer_options"])  # 0.16 gives them by position
        slots = options.get("patches_replace", {}).get("dit", {})
        img, txt = self.img_in(img), self.txt_in(txt)
        vec = self.time_in(timestep_embedding(timesteps, 256).to(img.dtype))
        if guidance is not None:
            vec = vec + self.guidance_in(timestep_embedding(guidance, 256).to(img.dtype))
        vec = vec + self.vector_in(y)
        pe = self.pe_embedder(torch.cat((txt_ids, img_ids), 1))

        def through(kind, i, run, **tokens):
            args, extra = {**tokens, "vec": vec, "pe": pe, "attn_mask": None}, {"original_block": run}
            if how in ("no img_slice", "twice"):
                args["transformer_options"] = options
            elif how == "in the second":
                extra["transformer_options"] = options
            slot = slots.get((kind, i), lambda args, extra: run(args))
            out = slot(args, extra)
            return slot({**args, **out}, extra) if how == "twice" else out

        for i, block in enumerate(self.double_blocks):

            def double(args, block=block):
                done = block(img=args["img"], txt=args["txt"], vec=args["vec"], pe=args["pe"])
                return {"img": done[0], "txt": done[1]}

            if how == "some blocks" and i:
                continue
            out = through("double_block", i, double, img=img, txt=txt)
            img, txt = out["img"], out["txt"]
        img = torch.cat((txt, img), 1)
        for i, block in enumerate(self.single_blocks):
            if how == "some blocks":
                continue
            img = through(
                "single_block", i, lambda a, b=block: {"img": b(a["img"], vec=a["vec"], pe=a["pe"])}, img=img
            )["img"]
        return self.final_layer(img[:, txt.shape[1] :], vec)

    return forward_orig


@contextmanager
def running(model, forward):
    network = model.model.diffusion_model
    network.forward_orig = types.MethodType(forward, network)
    try:
        yield
    finally:
        del network.forward_orig


HOWS = ["no options", "in the second", "no img_slice", "twice", "some blocks"]


@pytest.mark.parametrize("control", [False, True], ids=["", "with a ControlNet"])
@pytest.mark.parametrize("how", HOWS)
def test_a_forward_of_another_pack(bench, how, control):
    """TeaCache, MagCache, WaveSpeed, TaylorSeer, PuLID, Patches_ll: the blocks see all tokens, and it is said."""
    model = bench.models["flux"]
    if control:
        model = model.clone()
        model.set_model_unet_function_wrapper(with_residuals)
    patched = toma(model, **MERGED)
    with running(model, foreign_forward(how)):
        assert torch.equal(builders.sample(patched, **RUN), builders.sample(model, **RUN))
    assert not told(patched).tokens and len(told(patched).notes) == 1
    assert "forward_orig" in told(patched).notes[0]
    says_what_it_did(told(patched))


def test_a_block_whose_forward_names_nothing(comfy, monkeypatch):
    """A pack may put `forward(self, *args, **kwargs)` into a class; Lumina 2 gives arguments by position."""
    import tiny_models

    case, model = tiny_models.CASES["lumina2"], tiny_models.build("lumina2")
    block, plain = type(model.model.diffusion_model.layers[0]), tiny_models.sample(case, model)
    original = block.forward
    monkeypatch.setattr(block, "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    patched = toma(model, **MERGED)
    assert torch.equal(tiny_models.sample(case, patched), plain)
    assert not told(patched).tokens
    says_what_it_did(told(patched))


def with_residuals(apply_model, args):
    """What a ControlNet adds after the first double block."""
    residual = torch.full((len(args["input"]), 64, 128), 0.1)
    return apply_model(args["input"], args["timestep"], **{**args["c"], "control": {"input": [residual], "output": []}})


@pytest.mark.parametrize("control", [False, True], ids=["", "with a ControlNet"])
@pytest.mark.parametrize("how", [how for how in HOWS if how != "some blocks"])
def test_slots_called_oddly(bench, how, control):
    """The same where nothing tells that it is foreign code: what can't be merged is not, and none fails."""
    model = bench.models["flux"]
    if control:
        model = model.clone()
        model.set_model_unet_function_wrapper(with_residuals)
    patched, forward = toma(model, **MERGED), foreign_forward(how)
    forward.__module__ = "comfy.ldm.flux.model"
    with running(model, forward):
        plain, out = builders.sample(model, **RUN), builders.sample(patched, **RUN)
    report = told(patched)
    if how == "no img_slice":
        assert torch.isfinite(out).all() and report.tokens
    else:
        why = "more than once" if how == "twice" else "transformer_options"
        assert torch.equal(out, plain) and not report.tokens and why in report.notes[0], report.notes
    says_what_it_did(report)


@pytest.mark.parametrize("settings", [FORECAST, MERGED], ids=["forecast", "merged"])
def test_skip_layer_guidance_on_the_first_and_last_block(bench, settings):
    def skipping(model):
        about = {"double_layers": "0", "single_layers": "1", "scale": 3.0, "rescaling_scale": 0.0}
        return node("SkipLayerGuidanceDiT", model=model, start_percent=0.0, end_percent=1.0, **about)[0]

    model = bench.models["flux"]
    without = builders.sample(toma(model, **settings), **RUN)
    effect = (builders.sample(skipping(model), **RUN) - builders.sample(model, **RUN)).flatten()
    for patched in (toma(skipping(model), **settings), skipping(toma(model, **settings))):
        out = builders.sample(patched, **RUN)
        assert torch.cosine_similarity((out - without).flatten(), effect, dim=0) > 0.3
        says_what_it_did(told(patched))
