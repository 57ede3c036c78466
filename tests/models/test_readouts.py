"""Results of a language model's handle other than scores, against softmaxes taken in full, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import rlflow.models.logprobs
from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ForwardPlan
from rlflow.models.logprobs import Softmax, token_kl
from rlflow.models.lora import LoRA
from rlflow.models.optimizer import Optimizer
from rlflow.models.packing import take
from rlflow.models.tiny import write_tiny_model
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample
from rlflow.values.ragged import Ragged
from tests.families.models import write_family
from tests.models.conftest import random_rows
from tests.strategies.reference import distance

Build = Callable[..., CausalLM]
OWN, OTHER = 0.7, 1.3  # temperatures
K = 3
EVERY = ("score", "given", "top", "hidden", "kl", "kl_over_other", "kl_given")  # see ASKS


@pytest.fixture(scope="session")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("readouts")
    return {"tiny": tiny} | {name: write_family(name, made / name) for name in ("llama", "cohere2", "granite")}


def loaded(folder: Path, plan: ForwardPlan, dtype: torch.dtype = torch.float64, **settings: object) -> CausalLM:
    handle = CausalLM(str(folder), **settings)  # type: ignore[arg-type]
    handle.attach(handle.load(folder, dtype, torch.device("cpu")), plan)
    return handle


def hinted(rows: Batch) -> Ragged:
    """Other prompts of the rows, some longer than theirs, some shorter."""
    lists = [[40 + row, *range(50, 50 + 4 * (row % 3))] for row in range(len(rows.lengths))]
    return Ragged.from_lists(lists)


def asked_of(rows: Batch) -> Tensor:
    """Tokens `[B, T, K]`, one of them twice."""
    ids = torch.randint(128, (*rows.response_ids.shape, K), generator=torch.Generator().manual_seed(3))
    ids[..., 1] = ids[..., 0]
    return ids


@dataclass(frozen=True)
class Heated(Batch):
    """Rows with temperatures of their own, `[B]`; 0 for a row that has none."""

    temperature: PerSample = field(kw_only=True)


def temperatures_of(rows: Batch, models: float) -> list[float]:
    """By the table of the column: 0 is the model's."""
    own = rows.temperature.tolist() if isinstance(rows, Heated) else [0.0] * len(rows.lengths)
    return [each or models for each in own]


def in_full(own: torch.nn.Module, other: torch.nn.Module, rows: Batch) -> dict[str, Tensor]:
    """All of `EVERY`, row by row by transformers' own forward, with softmaxes of the whole vocabulary."""
    of_own, of_other = temperatures_of(rows, OWN), temperatures_of(rows, OTHER)
    shape, ids, prompts = rows.response_ids.shape, asked_of(rows), hinted(rows).rows()
    zeros = {
        name: torch.zeros(shape, dtype=torch.float64) for name in EVERY if name == "score" or name.startswith("kl")
    }
    found = zeros | {name: torch.zeros(*shape, K, dtype=torch.float64) for name in ("given", "top")}
    found["hidden"] = torch.zeros(shape[0], own.config.hidden_size, dtype=torch.float64)
    for row, prompt in enumerate(rows.prompt_ids.rows()):
        response = rows.response_ids[row, : rows.lengths[row]]
        read = own(torch.cat([prompt, response])[None], output_hidden_states=True)
        found["hidden"][row] = read.hidden_states[-1][0, -1]
        if not len(response):
            continue
        p = (read.logits[0, len(prompt) - 1 : -1] / of_own[row]).log_softmax(-1)
        found["score"][row, : len(response)] = p.gather(1, response[:, None])[:, 0]
        with torch.no_grad():
            q, q_given = (
                (
                    other(torch.cat([before, response])[None]).logits[0, len(before) - 1 : -1] / of_other[row]
                ).log_softmax(-1)
                for before in (prompt, prompts[row])
            )
        here = slice(len(response))
        found["given"][row, here] = p.gather(1, ids[row, here])
        found["top"][row, here] = p.sort(dim=1, descending=True).values[:, :K]
        found["kl"][row, here] = (p.exp() * (p - q)).sum(1)
        found["kl_over_other"][row, here] = (q.exp() * (q - p)).sum(1)
        found["kl_given"][row, here] = (p.exp() * (p - q_given)).sum(1)
    return found


ASKS: dict[str, Callable[[CausalLM, CausalLM, Batch, Tensor, Ragged], Tensor]] = {
    "score": lambda own, other, rows, ids, given: own.logprobs(rows),
    "given": lambda own, other, rows, ids, given: own.logprobs_of(rows, ids),
    "top": lambda own, other, rows, ids, given: own.topk(rows, K)[0],
    "hidden": lambda own, other, rows, ids, given: own.hidden(rows),
    "kl": lambda own, other, rows, ids, given: own.kl(rows, other),
    "kl_over_other": lambda own, other, rows, ids, given: own.kl(rows, other, over="other"),
    "kl_given": lambda own, other, rows, ids, given: own.kl(rows, other, given=given),
}


@dataclass(frozen=True)
class Expected:
    values: dict[str, Tensor]
    weights: dict[str, Tensor]  # of the values in the loss
    gradients: dict[str, dict[str, Tensor]]  # of each one's loss, by Hugging Face name


def expected_of(own: Path, other: Path, rows: Batch) -> Expected:
    student = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float64)
    values = in_full(student, teacher, rows)
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(x.shape, dtype=torch.float64, generator=generator) for name, x in values.items()}
    parameters = dict(student.named_parameters())
    gradients = {}
    for name in EVERY:
        loss = (weights[name] * values[name]).sum()
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, materialize_grads=True)
        gradients[name] = dict(zip(parameters, found, strict=True))
    return Expected({name: x.detach() for name, x in values.items()}, weights, gradients)


def gradients_of(student: CausalLM, teacher: CausalLM, rows: Batch, name: str, weights: Tensor) -> dict[str, Tensor]:
    """Summed over micro-batches, by Hugging Face name."""
    assert student._forward is not None
    student._forward.zero_grad()
    with student.training():
        for part in student.plan.micro_batches(rows, [hinted(rows)]):
            asked = ASKS[name](student, teacher, take_batch(rows, part), asked_of(rows)[part], hinted(rows).take(part))
            (weights[part] * asked).sum().backward()
    named = student._forward.named_parameters()
    return {key.removeprefix("model."): p.grad.clone() for key, p in named if p.grad is not None}


# The student's family (`tiny` is of Qwen2), the teacher's of another width, and whether rows are packed; the logits of
# the last two are scaled.
FAMILIES = [("tiny", "llama", (True, False)), ("llama", "tiny", (True,)), ("granite", "cohere2", (False,))]


@pytest.mark.parametrize(("own", "other", "packings"), FAMILIES)
@pytest.mark.parametrize("heated", [False, True])
def test_values_and_gradients_are_those_of_full_softmaxes(
    own: str,
    other: str,
    packings: tuple[bool, ...],
    heated: bool,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = random_rows((3, 4, 1, 2), (5, 0, 11, 1))
    if heated:
        column = torch.tensor([0.4, 0.9, 0.0, 2.5], dtype=torch.float64)
        rows = Heated(*(getattr(rows, each.name) for each in fields(Batch)), temperature=column)
        monkeypatch.setattr(rlflow.models.logprobs, "CHUNK_ELEMENTS", 1200)  # a few tokens at a time
    expected = expected_of(folders[own], folders[other], rows)
    for packing in packings:
        plan = ForwardPlan(20, packing)
        student = loaded(folders[own], plan, temperature=OWN)
        teacher = loaded(folders[other], plan, trainable=False, temperature=OTHER)
        student.reads_temperature = teacher.reads_temperature = heated
        for name in EVERY:
            found = ASKS[name](student, teacher, rows, asked_of(rows), hinted(rows))
            torch.testing.assert_close(found, expected.values[name], rtol=1e-10, atol=1e-10, msg=name)
            gradients = gradients_of(student, teacher, rows, name, expected.weights[name])
            assert distance(gradients, expected.gradients[name]) < 1e-10, name
        assert teacher._forward is not None
        assert all(parameter.grad is None for parameter in teacher._forward.parameters())
        logprobs, tokens = student.topk(rows, K)
        assert torch.equal(student.logprobs_of(rows, tokens), logprobs)


def take_batch(rows: Batch, part: Tensor) -> Batch:
    some = take(rows, part)
    own = {"temperature": rows.temperature[part]} if isinstance(rows, Heated) else {}
    return replace(rows, prompt_ids=some.prompt_ids, response_ids=some.response_ids, lengths=some.lengths, **own)


def test_without_rows_all_are_empty_and_every_weight_gets_a_zero_gradient(handle: Build, tiny: Path) -> None:
    student, teacher = handle(ForwardPlan()), loaded(tiny, ForwardPlan(), trainable=False)
    none = random_rows((), ())
    with student.training():
        ids, given = torch.zeros(0, 0, K, dtype=torch.int64), Ragged.from_lists([])
        found = {name: ask(student, teacher, none, ids, given) for name, ask in ASKS.items()}
        assert {name: tuple(x.shape) for name, x in found.items()} == {
            "score": (0, 0),
            "given": (0, 0, 3),
            "top": (0, 0, 3),
            "hidden": (0, 32),
            "kl": (0, 0),
            "kl_over_other": (0, 0),
            "kl_given": (0, 0),
        }
        sum(x.sum() for x in found.values()).backward()  # type: ignore[union-attr]
    assert student._forward is not None
    assert all(p.grad is not None and not p.grad.any() for p in student._forward.parameters())


def test_a_row_costs_what_the_longer_of_both_prompts_takes() -> None:
    rows = random_rows((3, 9), (4, 4))
    prompts = Ragged.from_lists([[1] * 12, [1] * 2])
    plan = ForwardPlan(token_budget=15)  # rows of 6 and 12 tokens, after the other prompts of 15 and 5
    assert [part.tolist() for part in plan.split(rows)] == [[1], [0]]
    assert len(plan.split(rows, prompts=[prompts])) == 2
    assert ForwardPlan(18).split(rows)[0].tolist() == [0, 1]  # 6 + 12
    assert len(ForwardPlan(18).split(rows, prompts=[prompts])) == 2  # 15 + 12
    assert len(ForwardPlan(27).split(rows, prompts=[prompts])) == 1


def test_the_sampled_tokens_logprobs_are_watched_by_all(handle: Build, tiny: Path, rows: Batch) -> None:
    student, teacher = handle(ForwardPlan(40)), loaded(tiny, ForwardPlan(40), trainable=False)
    seen: list[Tensor] = []
    student.watch = lambda _, logprobs: seen.append(logprobs)
    logprobs = student.logprobs(rows)
    student.logprobs_of(rows, asked_of(rows))
    student.topk(rows, 2)
    student.kl(rows, teacher)
    student.kl(rows, teacher, given=hinted(rows))
    assert len(seen) == 5
    for each in seen:
        torch.testing.assert_close(each, logprobs, rtol=0, atol=1e-12)


def test_kl_to_the_same_distribution_is_zero_and_to_another_above(handle: Build, tiny: Path, rows: Batch) -> None:
    student = handle(ForwardPlan(40), temperature=OWN)
    same = loaded(tiny, ForwardPlan(40), trainable=False, temperature=OWN)
    assert float(student.kl(rows, same).abs().max()) < 1e-12
    other = loaded(tiny, ForwardPlan(40), trainable=False, temperature=OTHER)
    assert bool((student.kl(rows, other)[rows.loss_mask] > 1e-3).all())


def test_the_kl_of_a_fair_coin_to_a_biased_one_by_hand() -> None:
    # One hidden unit of 1: the weights are the logits. p = (1/2, 1/2), q = (1/4, 3/4).
    one, fair, biased = torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]).log()
    targets = torch.tensor([1])
    kl, logprob = token_kl(one, fair, targets, Softmax(), one, biased, Softmax())
    assert kl.item() == pytest.approx(0.143841, abs=1e-6)  # ln 2 - ln 3 / 2 = 0.693147 - 0.549306
    assert logprob.item() == pytest.approx(-0.693147, abs=1e-6)
    reverse, _ = token_kl(one, fair, targets, Softmax(), one, biased, Softmax(), over_other=True)
    assert reverse.item() == pytest.approx(0.130812, abs=1e-6)  # 1/4 ln 1/2 + 3/4 ln 3/2 = -0.173287 + 0.304099


@pytest.mark.parametrize("over_other", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 10**6])
def test_gradients_of_kl_are_those_of_finite_differences(over_other: bool, chunk_elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(4, n, dtype=torch.float64, generator=generator) for n in (3, 5))
    weight, frozen = (torch.randn(6, n, dtype=torch.float64, generator=generator) for n in (3, 5))
    own, theirs = Softmax(0.7, 0.5, 0.8), Softmax(1.2, 2.0)
    targets = torch.zeros(4, dtype=torch.int64)

    def kl(h: Tensor, w: Tensor) -> Tensor:
        return token_kl(h, w, targets, own, other, frozen, theirs, over_other, chunk_elements)[0]

    assert torch.autograd.gradcheck(kl, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_head_takes_both_products_in_float32(dtype: torch.dtype) -> None:
    """Against float64 of the same rounded numbers."""
    generator = torch.Generator().manual_seed(0)
    hidden, other, weight, frozen = (torch.randn(n, 5, generator=generator).to(dtype) for n in (7, 7, 11, 11))
    targets = torch.zeros(7, dtype=torch.int64)
    own, theirs = (hidden.double(), weight.double()), (other.double(), frozen.double())
    exact, _ = token_kl(*own, targets, Softmax(), *theirs, Softmax())
    for wide in (True, False):
        found, _ = token_kl(hidden, weight, targets, Softmax(wide=wide), other, frozen, Softmax(wide=wide))
        assert found.dtype == torch.float32
        assert (float((found.double() - exact).abs().max()) < 2e-6) is wide


class _Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_of_tokens_by_vocabulary_is_ever_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both models' passes, forward and backward: 300 scored tokens of 128 would be 38,400 numbers."""
    limit = 12_000
    monkeypatch.setattr(rlflow.models.logprobs, "CHUNK_ELEMENTS", limit)
    folder = write_tiny_model(tmp_path / "narrow", hidden_size=8, intermediate_size=16, layers=1, heads=2, kv_heads=1)
    student = loaded(folder, ForwardPlan(), torch.float32)
    teacher = loaded(folder, ForwardPlan(), torch.float32, trainable=False)
    rows = random_rows((2, 3, 4), (100, 100, 100))
    with _Largest() as largest, student.training():
        loss = student.kl(rows, teacher).sum() + student.kl(rows, teacher, over="other").sum()
        loss = loss + student.topk(rows, 2)[0].sum() + student.logprobs_of(rows, rows.response_ids[..., None]).sum()
        loss.backward()
    assert largest.elements <= limit


def test_a_model_without_its_adapters_can_be_compared_with(tiny: Path, rows: Batch) -> None:
    actor = CausalLM(str(tiny), lora=LoRA(rank=2))
    actor.attach(actor.load(tiny, torch.float64, torch.device("cpu")), ForwardPlan(40))
    reference = actor.without_adapters()
    reference.attach_to_owner()
    assert float(actor.kl(rows, reference).abs().max()) < 1e-12  # new adapters change nothing
    assert actor._forward is not None
    for name, parameter in actor._forward.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    with actor.training():
        kl = actor.kl(rows, reference)
        kl.sum().backward()
    plain = loaded(tiny, ForwardPlan(40), trainable=False)
    torch.testing.assert_close(kl.detach(), actor.kl(rows, plain), rtol=0, atol=1e-12)
    assert float(kl.detach().mean()) > 1e-3


def test_what_cannot_be_asked_is_refused_in_one_line(
    handle: Build, tiny: Path, rows: Batch, folders: dict[str, Path]
) -> None:
    student, teacher = handle(ForwardPlan()), loaded(tiny, ForwardPlan(), trainable=False)
    asks: list[tuple[str, Callable[[], object]]] = [
        (r"tokens \[6, 30\] for responses \[6, 30\]", lambda: student.logprobs_of(rows, rows.response_ids)),
        ("`topk` was asked for 0 tokens", lambda: student.topk(rows, 0)),
        ("which is trained: no gradient would go to it", lambda: student.kl(rows, student)),
        ("given 2 other prompts for 6 rows", lambda: student.kl(rows, teacher, Ragged.from_lists([[1], [2]]))),
        ("row 0 has an empty prompt", lambda: student.kl(rows, teacher, Ragged.from_lists([[]] * 6))),
        ("`over` of `kl` is 'both'", lambda: student.kl(rows, teacher, over="both")),  # type: ignore[arg-type]
    ]
    for message, ask in asks:
        with pytest.raises(UserError, match=message) as error:
            ask()
        assert "\n" not in str(error.value)


def test_models_of_other_vocabularies_are_not_compared(handle: Build, tmp_path: Path, rows: Batch) -> None:
    folder = write_tiny_model(tmp_path / "more", hidden_size=32, layers=1)
    larger = AutoModelForCausalLM.from_pretrained(folder)
    larger.resize_token_embeddings(130)
    larger.save_pretrained(tmp_path / "larger")
    other = loaded(tmp_path / "larger", ForwardPlan(), trainable=False, optimizer=None)
    with pytest.raises(UserError, match="output layers of 128 and 130 tokens"):
        handle(ForwardPlan(), optimizer=Optimizer()).kl(rows, other)
