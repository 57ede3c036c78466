"""Every algorithm with settings that matter, and the expected result of one step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlflow import CausalLM, Environment, Optimizer, RewardModel, ValueModel, algorithms
from rlflow.functional import Importance
from tests.algorithm_factory import OF_A_MODEL, PARTS
from tests.exactness.step_record import GROUP, LONGEST, PROMPTS, TEMPERATURE, USELESS, Answer, Recording
from tests.reference.advantages_float64 import dr_grpo
from tests.reference.discriminator_float64 import discriminator_update
from tests.reference.pairs_float64 import Pair, dpo_update, kto_update, reward_model_update, simpo_update
from tests.reference.policy_float64 import Folders, Objective, Sample, critic_updates, policy_updates
from tests.reference.score_centering_float64 import Centered, score_centering_update
from tests.reference.sft_float64 import Example, sft_update
from tests.reference.update import Step, Update

LR = 0.05
OPTIMIZER = Optimizer("sgd", lr=LR, gradient_clipping=0.0)


@dataclass(frozen=True)
class Case:
    """One algorithm as it is run here.

    Attributes:
        algorithm: Name of its class.
        objective: Objective that the reference computes; its settings are the algorithm's too. None without sampling.
        more: Further settings of the algorithm.
        prompts: Prompts that the step trains on.
        data: The dataset, which may hold more.
        models: Folders of other models than the trained one, by role, by their names in the recording.
        past: Whether old logprobs and old values are the recorded ones; else the models themselves say them.
        model: The folder of the model to train.
        columns: Columns of the dataset that are read in addition to the prompts.
        turns: Whether the responses are conversations, in which an environment wrote some of the tokens.
        noise: The engine's logprobs of those.
        paid: Things that the environment pays for: each of the turns, or all of them at the end; "" for nothing.
    """

    algorithm: str
    objective: Objective | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[int, ...] = (0, 1, 2, 3, 4)  # 15 samples: no number of ranks but 1 divides them
    data: str = "five"
    models: Mapping[str, str] = field(default_factory=dict)
    past: bool = True
    model: str = "policy"
    columns: Mapping[str, Any] = field(default_factory=dict)
    turns: bool = False
    noise: float = 0.0
    paid: Literal["", "turns", "end"] = ""


def of_samples(advantages: str, surrogate: str = "ppo", **settings: Any) -> Objective:
    """The objective of an algorithm that samples."""
    return Objective(advantages, surrogate, max_response_length=LONGEST, temperature=TEMPERATURE, **settings)


SEQUENCES = "sequence-mean-token-mean"
REFERENCE = {"reference": "reference"}
PAIRS = {"response": "answer", "rejected": "worse"}
BETA = 0.3
GAMMA = 0.2
IN_ORDER = {"response": "answer", "shuffle": False}  # the divergence is of each row with the next
KTO_WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
GRPO = of_samples("grpo", clip_high=0.28, kl_coef=0.3, kl_kind="k3-ratio")

CASES = {
    "GRPO": Case("GRPO", GRPO, models=REFERENCE),
    "DrGRPO": Case("DrGRPO", of_samples("dr_grpo", loss_aggregation="constant", mask_truncated=True, entropy_coef=0.3)),
    "DAPO": Case(
        "DAPO",
        of_samples("grpo", clip_high=0.28, overlong_buffer=8, importance_mode="mask"),
        prompts=tuple(p for p in range(PROMPTS) if p not in USELESS),
        data="all",  # the filter drops half of them, so a step takes two draws
    ),
    "RLOO": Case(
        "RLOO",
        of_samples("rloo", kl_in_reward=True, kl_kind="k1", kl_coef=0.1, importance_level="sequence"),
        models=REFERENCE,
    ),
    "OPO": Case("OPO", of_samples("opo", overlong_buffer=8, loss_aggregation="sequence-mean-token-sum")),
    "ReMax": Case("ReMax", of_samples("remax", kl_kind="k3+", kl_coef=0.1), {"group_size": GROUP}, models=REFERENCE),
    "REINFORCEPlusPlus": Case(
        "REINFORCEPlusPlus",
        of_samples("reinforce++", kl_in_reward=True, kl_kind="k1", kl_coef=0.1, gamma=0.9, mask_truncated=True),
        {"gamma": 0.9},
        models=REFERENCE,
    ),
    "REINFORCEPlusPlusBaseline": Case(
        "REINFORCEPlusPlusBaseline",
        of_samples("reinforce++ baseline", kl_kind="k2", kl_coef=0.1, mask_truncated=True),
        models=REFERENCE,
    ),
    "GSPO": Case(
        "GSPO",
        of_samples(
            "grpo",
            "gspo",
            clip_low=0.03,
            clip_high=0.04,
            loss_aggregation=SEQUENCES,
            importance_level="geometric",
            importance_high=1.1,
        ),
    ),
    "CISPO": Case("CISPO", of_samples("grpo", "cispo", clip_high=0.28, importance_mode="mask")),
    "GMPO": Case("GMPO", of_samples("grpo", "gmpo", clip_low=0.2, clip_high=0.28, loss_aggregation=SEQUENCES)),
    "CPGD": Case(
        "CPGD",
        of_samples("grpo", "cpgd", clip_high=0.28, drift_coef=0.3, drift_clip=0.1),
        {"drift_coef": 0.3, "drift_clip": 0.1},
    ),
    "SAPO": Case(
        "SAPO",
        of_samples("grpo", "sapo", tau_pos=2.0, tau_neg=3.0, loss_aggregation=SEQUENCES),
        {"tau_pos": 2.0, "tau_neg": 3.0},
    ),
    "GDPO": Case("GDPO", of_samples("gdpo", part_weights=(1.0, 0.5)), {"part_weights": {"ones": 1.0, "several": 0.5}}),
    "DPPO": Case("DPPO", of_samples("dr_grpo", "dppo", anchor="rollout", delta=0.05), {"delta": 0.05}),
    "MaxRL": Case("MaxRL", of_samples("maxrl", clip_high=0.28, loss_aggregation="sequence-mean-token-sum")),
    "OffPolicySequenceMasking": Case(
        "OffPolicySequenceMasking",
        of_samples(
            "dr_grpo",
            "off-policy sequence masking",
            anchor="rollout",
            delta=0.05,
            kl_coef=0.3,
            kl_kind="k3-ratio",
            loss_aggregation=SEQUENCES,
        ),
        {"delta": 0.05},
        models=REFERENCE,
    ),
    "REINFORCE": Case(
        "REINFORCE",
        of_samples(
            "rloo",
            "importance sampled",
            anchor="rollout",
            kl_in_reward=True,
            kl_kind="k1",
            kl_coef=0.1,
            entropy_coef=0.1,
        ),
        models=REFERENCE,
    ),
    "ScoreCentering": Case("ScoreCentering", of_samples("dr_grpo", "policy gradient"), {"top_k": 4}, past=False),
    "GPG": Case("GPG", of_samples("gpg", "policy gradient", entropy_coef=0.1)),
    "OnPolicyDistillation": Case("OnPolicyDistillation", of_samples("distillation"), models={"teacher": "reference"}),
    "GAIL": Case(
        "GAIL", of_samples("grpo", clip_high=0.28), models={"discriminator": "judge"}, columns={"response": "answer"}
    ),
    "PPO": Case(
        "PPO",
        of_samples(
            "gae",
            kl_in_reward=True,
            kl_kind="k1",
            kl_coef=0.1,
            gamma=0.97,
            lam=0.9,
            critic_lam=0.8,
            critic_loss_aggregation=SEQUENCES,
            value_clip=0.2,
            bootstrap=True,
        ),
        {
            "gamma": 0.97,
            "lam": 0.9,
            "critic_lam": 0.8,
            "value_clip": 0.2,
            "on_truncation": "bootstrap",
        },
        models=REFERENCE | {"critic": "critic"},
    ),
    "SFT": Case("SFT", columns={"response": "answer"}),
    "DPO": Case("DPO", more={"beta": BETA}, models=REFERENCE, columns=PAIRS),
    "KTO": Case(  # models the other way round: the divergence of the recorded policy is estimated below 0, which is 0
        "KTO", more={"beta": BETA, **KTO_WEIGHTS}, model="reference", models={"reference": "policy"}, columns=IN_ORDER
    ),
    "SimPO": Case("SimPO", more={"beta": BETA, "gamma": GAMMA}, columns=PAIRS),
    "RewardModelTraining": Case("RewardModelTraining", model="judge", columns=PAIRS),
}

PPO = CASES["PPO"]
assert PPO.objective is not None

VARIATIONS = {
    "PPO with truncated responses masked": replace(
        PPO,
        objective=replace(PPO.objective, bootstrap=False, mask_truncated=True, entropy_coef=0.1),
        more={**PPO.more, "on_truncation": "mask"},
    ),
    "PPO with a reward model": replace(
        PPO,
        objective=replace(PPO.objective, bootstrap=False, reward_model_coef=2.0, overlong_buffer=8, value_clip=None),
        more={**PPO.more, "on_truncation": "terminal", "value_clip": None},
        models={**PPO.models, "reward_model": "judge"},
    ),
    "GRPO with a reward model": replace(
        CASES["GRPO"],
        objective=replace(GRPO, reward_model_coef=0.5, kl_coef=0.0),
        models={"reward_model": "judge"},
    ),
    "CPGD with its filter's weight": replace(
        CASES["CPGD"],
        objective=of_samples("cpgd", "cpgd", drift_coef=0.01, weight_cap=1.5),
        more={"weight": "filter", "weight_cap": 1.5},
        prompts=tuple(range(PROMPTS)),
        data="all",  # half of them are useless
    ),
    "ReMax with KL in the reward": Case(
        "ReMax",
        of_samples("remax", kl_in_reward=True, kl_kind="k1", kl_coef=0.1),
        {"group_size": GROUP},
        models=REFERENCE,
    ),
    "GRPO anchored on the sampler": replace(CASES["GRPO"], objective=replace(GRPO, anchor="rollout")),
    "KL in the reward of the sampler": replace(
        CASES["RLOO"],
        objective=of_samples("rloo", anchor="rollout", kl_in_reward=True, kl_kind="k1", kl_coef=0.1),
    ),
    "distillation of whole responses": replace(
        CASES["OnPolicyDistillation"], objective=of_samples("minillm"), more={"reverse_kl": "sequence"}
    ),
    "dual clip": replace(CASES["GRPO"], objective=replace(GRPO, dual_clip=1.1)),
    "KL as k2": replace(CASES["GRPO"], objective=replace(GRPO, kl_kind="k2")),
    "KL as k3": replace(CASES["GRPO"], objective=replace(GRPO, kl_kind="k3")),
    "KL as abs": replace(CASES["GRPO"], objective=replace(GRPO, kl_kind="abs")),
} | {
    mode: replace(CASES["GRPO"], objective=replace(GRPO, loss_aggregation=mode))
    for mode in ("sequence-mean-token-mean", "sequence-mean-token-sum", "constant")
}

# Without a setting: what the objective is then. The greedy rewards and the group need no other proof.
OFF: dict[str, Any] = {
    "clip_low": 0.999,
    "clip_high": 99.0,
    "dual_clip": None,
    "drift_coef": 0.0,
    "anchor": "old",
    "delta": 99.0,
    "tau_pos": 1e-3,
    "tau_neg": 1e-3,
    "part_weights": (1.0, 1.0),
    "drift_clip": 99.0,
    "weight_cap": 99.0,
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "overlong_buffer": None,
    "mask_truncated": False,
    "gamma": 1.0,
    "lam": 1.0,
    "critic_lam": 1.0,
    "critic_loss_aggregation": "token-mean",
    "value_clip": None,
    "bootstrap": False,
    "importance_mode": "truncate",
    "importance_level": "token",
    "importance_high": 99.0,
    "loss_aggregation": "token-mean",
    "reward_model_coef": 0.0,
}

# Settings of `Objective` that algorithms have under the same name.
SHARED = (
    "max_response_length",
    "temperature",
    "clip_low",
    "clip_high",
    "dual_clip",
    "anchor",
    "kl_coef",
    "kl_kind",
    "kl_in_reward",
    "entropy_coef",
    "overlong_buffer",
    "mask_truncated",
    "reward_model_coef",
    "loss_aggregation",
)


def settings(case: Case, recording: Recording) -> dict[str, Any]:
    """The arguments of the algorithm without its reward, including those of the trained model."""
    given = {"optimizer": OPTIMIZER, **case.more}
    given |= {role: _model(role, str(getattr(recording, folder)), case) for role, folder in case.models.items()}
    if case.objective is None:
        return given
    objective = case.objective
    shared = {name: getattr(objective, name) for name in SHARED if _takes(case.algorithm, name)}
    if case.paid:
        shared["environment"] = Environment("tests.controller.answering.Counting", max_turns=4)
    if objective.by_turn:
        shared["advantages_at"] = "turn"
    ends = objective.importance_low, objective.importance_high
    importance = Importance(objective.importance_level, objective.importance_mode, *ends)  # type: ignore[arg-type]
    corrected = importance if objective.anchor == "old" else None
    return {"group_size": GROUP, "importance": corrected} | shared | given


def _takes(algorithm: str, setting: str) -> bool:
    """Whether an algorithm has a setting, of its actor and of its parts too."""
    arguments = inspect.signature(getattr(algorithms, algorithm)).parameters
    return setting in OF_A_MODEL or setting in arguments or PARTS.get(setting, "").partition(".")[0] in arguments


def _model(role: str, folder: str, case: Case) -> CausalLM | ValueModel | RewardModel:
    if role == "reward_model":
        return RewardModel(folder)
    if role == "discriminator":
        return RewardModel(folder, optimizer=OPTIMIZER)
    if role != "critic":
        return CausalLM(folder)
    assert case.objective is not None
    of_both = ("epochs", "samples_per_update", "gradient_checkpointing")
    given = {name: case.more[name] for name in of_both if name in case.more}
    return ValueModel(folder, optimizer=OPTIMIZER, loss_aggregation=case.objective.critic_loss_aggregation, **given)


def truth(case: Case, recording: Recording) -> dict[str, Update]:
    """The reference's result of one step, by trained role."""
    step = Step(lr=LR)
    model = getattr(recording, case.model)
    pairs = [Pair(recording.prompts[p], *recording.pairs[p]) for p in case.prompts]
    match case.algorithm:
        case "SFT":
            examples = [Example(pair.prompt_ids, pair.chosen_ids) for pair in pairs]
            return {"actor": sft_update(model, examples, step=step)}
        case "DPO":
            return {"actor": dpo_update(model, recording.reference, pairs, BETA, step)}
        case "KTO":
            rows = [(pair.prompt_ids, pair.chosen_ids, p % 3 > 0) for p, pair in zip(case.prompts, pairs, strict=True)]
            weights = tuple(KTO_WEIGHTS.values())
            return {"actor": kto_update(model, recording.policy, rows, BETA, weights, step)}
        case "SimPO":
            return {"actor": simpo_update(model, pairs, BETA, GAMMA, step)}
        case "ScoreCentering":
            return {"actor": _centered(case, recording, step)}
        case "RewardModelTraining":
            return {"reward_model": reward_model_update(model, pairs, step)}
        case "GAIL":
            assert case.objective is not None
            sampled = samples(case, recording)
            given = [(pair.prompt_ids, pair.chosen_ids) for pair in pairs]
            rows = [(sample.prompt_ids, sample.response_ids) for sample in sampled]
            discriminator, worth = discriminator_update(recording.judge, given, rows, step)
            paid = [replace(sample, reward=reward) for sample, reward in zip(sampled, worth, strict=True)]
            (actor,) = policy_updates(model, paid, case.objective, [range(len(paid))], step)
            return {"discriminator": discriminator, "actor": actor}
    one_update = truth_of_updates(case, recording, [range(len(case.prompts) * GROUP)])
    return {role: update for role, (update,) in one_update.items()}


def _centered(case: Case, recording: Recording, step: Step) -> Update:
    assert case.objective is not None
    answers = [answer for p in case.prompts for answer in recording.answers[p][:-1]]
    sampled = samples(case, recording)
    worth = dr_grpo([sample.reward for sample in sampled], [sample.group for sample in sampled])
    rows = []
    for sample, answer, advantage in zip(sampled, answers, worth, strict=True):
        pairs = zip(answer.tokens, answer.rollout_logprobs, answer.others, strict=True)
        choices = [((token, *others), (own, *others.values())) for token, own, others in pairs]
        rows.append(Centered(sample.prompt_ids, sample.response_ids, advantage, choices))
    high = case.objective.importance_high
    return score_centering_update(getattr(recording, case.model), rows, high, TEMPERATURE, step)


def truth_of_updates(
    case: Case, recording: Recording, mini_batches: Sequence[Sequence[int]]
) -> dict[str, list[Update]]:
    """The reference's result of each update of one step, by trained role.

    Args:
        case: Case of an algorithm that samples.
        recording: Recording of the step.
        mini_batches: For each update the numbers of its samples, as `samples` gives them.
    """
    assert case.objective is not None
    models = {name: getattr(recording, folder) for name, folder in case.models.items()}
    folders = Folders(
        reference=models.get("reference") or models.get("teacher"),
        critic=models.get("critic"),
        reward_model=models.get("reward_model"),
    )
    model = getattr(recording, case.model)
    given = model, samples(case, recording), case.objective, mini_batches, Step(lr=LR), folders
    updates = {"actor": policy_updates(*given)}
    if folders.critic is not None:
        updates["critic"] = critic_updates(*given)
    return updates


def _conversation(answer: Answer, case: Case) -> dict[str, Any]:
    if not case.turns:
        return {}
    given = answer.turn_rewards
    at_end = [*[0.0] * (len(given) - 1), sum(given)]
    paid = {"turns": given, "end": at_end}.get(case.paid)
    return {"loss_mask": answer.spoken, "segments": answer.segments, "turn_rewards": paid}


def samples(case: Case, recording: Recording) -> list[Sample]:
    """The samples of the case's prompts."""
    return [
        Sample(
            recording.prompts[p],
            answer.tokens,
            answer.reward + (sum(answer.turn_rewards) if case.paid else 0.0),
            group=p,
            rollout_logprobs=answer.rollout_logprobs,
            old_logprobs=answer.old_logprobs if case.past else None,
            finished=answer.finished,
            **_conversation(answer, case),
            greedy_reward=recording.answers[p][-1].reward,
            old_values=answer.old_values if case.past else None,
        )
        for p in case.prompts
        for answer in recording.answers[p][:-1]
    ]
