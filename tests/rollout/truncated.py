"""Training on tokens that an engine sampled from some of the vocabulary, against sums over all responses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import CausalLM
from rlflow.models.handle import ForwardPlan
from rlflow.rollout import RolloutEngine, Sampling
from rlflow.rollout.sampling import sample
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged
from rlflow.values.response_settings import ResponseSettings, SamplingSettings
from rlflow.values.rollout import Rollout
from rlflow.values.truncation import END, NOTED, SUPPORT, Truncation
from tests.rollout.test_partial_responses import batch
from tests.rollout.trained import PROMPTS

TEMPERATURE, MOST = 0.8, 6
TRUNCATION = Truncation(top_p=0.9, top_k=MOST, min_p=0.02)
FLOAT64 = 1e-10


def handle_of(folder: Path) -> CausalLM:
    """The policy of a folder, in float64."""
    handle = CausalLM(str(folder), temperature=TEMPERATURE)
    handle.attach(handle.load(folder, torch.float64, torch.device("cpu")), ForwardPlan())
    return handle


def sampled(engine: RolloutEngine, version: int, longest: int = 9, n: int = 4) -> Rollout:
    sampling = Sampling(longest, TEMPERATURE, (0,), truncation=TRUNCATION)
    settings = {"seed": 0, "draw": 0, "node": "rollout", "version": version, "decode": str}
    paths = RowPath(torch.arange(len(PROMPTS))[:, None], ("batch",))
    return sample(engine, batch(), paths, n, sampling, **settings)  # type: ignore[arg-type]


def support_of(engine: RolloutEngine, read: list[int], version: int) -> list[int]:
    """The tokens that the engine samples from behind these."""
    (one,) = engine.generate([read], [3], Sampling(1, TEMPERATURE, (), truncation=TRUNCATION), version)
    *others, end = one.columns["support"].tolist()
    assert end == END
    return sorted([*others, *one.token_ids])


def check_support(engine: RolloutEngine, folder: Path, version: int) -> None:
    """The engine's logprobs are the trainer's over the tokens that it noted, and far from those over all."""
    rollout, handle = sampled(engine, version), handle_of(folder)
    there = torch.arange(rollout.response_ids.shape[1]) < rollout.lengths[:, None]
    torch.testing.assert_close(handle.logprobs(rollout)[there], rollout.logprobs[there].double(), rtol=0, atol=1e-4)
    sampler = rollout.sampler_logprobs  # [B, T, K]
    torch.testing.assert_close(sampler.exp().sum(-1)[there], torch.ones(int(there.sum())), rtol=0, atol=1e-5)
    own = there[..., None] & (sampler > -torch.inf)
    for tokens in (4096, 1):  # all rows in one micro-batch, or each in one
        handle.plan = replace(handle.plan, token_budget=tokens)
        torch.testing.assert_close(handle.score_support(rollout)[2][own], sampler[own].double(), rtol=0, atol=1e-4)
    alone = replace(rollout, support=Ragged(rollout.support.values[:0], torch.zeros_like(rollout.lengths)))
    assert (handle.logprobs(alone)[there] - rollout.logprobs[there]).mean() < -0.03
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in PROMPTS:
        logits = model(torch.tensor([prompt])).logits[:, -1] / TEMPERATURE
        assert support_of(engine, prompt, version) == TRUNCATION.kept(logits).nonzero()[:, 1].tolist()


OWN = (
    None,
    SamplingSettings(top_k=1, temperature=2.0),
    SamplingSettings(temperature=0.4),
    SamplingSettings(top_p=0.95, top_k=4, temperature=1.5),
)


def check_own_settings(engine: RolloutEngine, folder: Path, version: int) -> None:
    """A prompt with settings of its own gets the response that a call with these settings for all gives it.

    Training scores each row at its temperature and over its tokens.
    """
    common = Sampling(9, TEMPERATURE, (0,), truncation=TRUNCATION)
    own = [OWN[place % len(OWN)] for place in range(len(PROMPTS))]
    seeds = list(range(len(PROMPTS)))
    limits = tuple(2 if place < 2 else 9 for place in range(len(PROMPTS)))  # the first rows leave the batch early
    mixed = replace(common, limits=limits, of_prompts=tuple(own))
    together = engine.generate(PROMPTS, seeds, mixed, version)
    assert dict(engine.completions(PROMPTS, seeds, mixed, version)) == dict(enumerate(together))
    for prompt, seed, limit, each, found in zip(PROMPTS, seeds, limits, own, together, strict=True):
        how = replace(common, max_tokens=limit)
        how = how if each is None else replace(how, temperature=each.temperature, truncation=each)
        (alone,) = engine.generate([prompt], [seed], how, version)
        assert found.token_ids == alone.token_ids
        torch.testing.assert_close(found.logprobs, alone.logprobs, rtol=0, atol=1e-5)
        assert found.columns.keys() == alone.columns.keys() == ({*NOTED} if how.truncation else set())
        if how.truncation:
            assert found.columns[SUPPORT].tolist() == alone.columns[SUPPORT].tolist()

    settings = {"seed": 0, "draw": 0, "node": "rollout", "version": version, "decode": str}
    paths = RowPath(torch.arange(len(PROMPTS))[:, None], ("batch",))
    of_prompts = [ResponseSettings(sampling=each) for each in own]
    rollout = sample(engine, batch(), paths, 2, common, of_prompts=of_prompts, **settings)  # type: ignore[arg-type]
    there = torch.arange(rollout.response_ids.shape[1]) < rollout.lengths[:, None]
    handle = handle_of(folder)
    assert (handle.logprobs(rollout) - rollout.logprobs)[there].abs().max() > 0.05  # it does not read the column
    handle.reads_temperature = True
    for tokens in (4096, 1):
        handle.plan = replace(handle.plan, token_budget=tokens)
        torch.testing.assert_close(handle.logprobs(rollout)[there], rollout.logprobs[there].double(), rtol=0, atol=1e-4)


def check_gradient(engine: RolloutEngine, folder: Path, version: int) -> None:
    """The policy gradient over all responses of two tokens is the derivative of their mean reward.

    The mean is over the distribution that the engine samples from, written down from its formula and differentiated.
    """
    prompt = PROMPTS[1]
    first = support_of(engine, prompt, version)
    second = {token: support_of(engine, [*prompt, token], version) for token in first}
    every = [(token, other) for token in first for other in second[token]]
    assert 2 < len(first) < MOST + 1
    assert len(every) > 8
    rewards = torch.randn(len(every), dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    expected_reward = torch.zeros((), dtype=torch.float64)
    for (token, other), reward in zip(every, rewards, strict=True):
        logits = model(torch.tensor([[*prompt, token]])).logits[0, -2:] / TEMPERATURE
        powers = [(logits[0] - logits[0].max()).exp(), (logits[1] - logits[1].max()).exp()]
        chances = powers[0][token] / powers[0][first].sum(), powers[1][other] / powers[1][second[token]].sum()
        expected_reward = expected_reward + chances[0] * chances[1] * reward
    expected_reward.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    places = [([x for x in first if x != token], [x for x in second[token] if x != other]) for token, other in every]
    support = [[*one, END, *two, END] for one, two in places]
    assert difference(gradient(folder, prompt, every, rewards, support), expected) < FLOAT64
    # Without the support, and with that of the other place, it is another one.
    assert difference(gradient(folder, prompt, every, rewards, [[] for _ in every]), expected) > 0.01
    swapped = [[*two, END, *one, END] for one, two in places]
    assert difference(gradient(folder, prompt, every, rewards, swapped), expected) > 0.01


def gradient(
    folder: Path, prompt: list[int], responses: list[tuple[int, int]], rewards: Tensor, support: list[list[int]]
) -> dict[str, Tensor]:
    """The sum over responses of probability times reward times the derivative of the logprob, by rlflow."""
    handle = handle_of(folder)
    ids = torch.tensor(responses)
    rollout = Rollout(
        prompt_ids=Ragged.from_lists([prompt] * len(ids)),
        response_ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        lengths=torch.full((len(ids),), 2),
        logprobs=torch.zeros(ids.shape),
        finished=torch.zeros(len(ids), dtype=torch.bool),
        path=RowPath(torch.arange(len(ids))[:, None], ("batch",)),
        version=torch.zeros(len(ids), dtype=torch.int64),
        versions=torch.zeros_like(ids, dtype=torch.int32),
        support=Ragged.from_lists(support, torch.int32),
        ended=torch.zeros(len(ids), dtype=torch.int64),
        texts=["" for _ in ids],
        rows=[{} for _ in ids],
    )
    with handle.training():
        logprobs = handle.logprobs(rollout)
    (rewards * logprobs.detach().sum(1).exp() * logprobs.sum(1)).sum().backward()
    assert handle._forward is not None
    return {
        handle._forward.hf_name(name): parameter.grad  # type: ignore[operator, misc]
        for name, parameter in handle._forward.named_parameters()
    }


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all tensors, over the norm of the expected ones."""
    apart = sum(float((found[name] - of).square().sum()) for name, of in expected.items())
    return float((apart / sum(float(of.square().sum()) for of in expected.values())) ** 0.5)
