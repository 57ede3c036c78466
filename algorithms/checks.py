"""What settings of a policy gradient cannot work together, refused before anything is loaded."""

from typing import TYPE_CHECKING

from rlflow import UserError

if TYPE_CHECKING:
    from .policy_gradient import PolicyGradient


def check(module: "PolicyGradient") -> None:
    """Refuse settings that cannot work.

    Raises:
        UserError: One cannot, alone or beside another.
    """
    name, fields = type(module).__name__, type(module).__dataclass_fields__
    check_updates(module)
    if module.compares_group and module.group_size < 2:
        raise UserError(f"`group_size` is {module.group_size}; group-relative advantages need at least 2. Raise it")
    for setting in module.unused:
        if getattr(module, setting) != fields[setting].default:
            raise UserError(f"`{setting}` is {getattr(module, setting)}, which {name} has no use for; leave it out")
    if module.advantages_at == "turn" and module.environment is None:
        raise UserError(
            "`advantages_at` is 'turn' without an `environment`, and a response to a prompt is one turn; set"
            " `environment`, or leave `advantages_at` out"
        )
    if module.advantages_at == "turn" and not module.compares_group:
        raise UserError(
            f"`advantages_at` is 'turn', and {name} compares no turns of a group; leave it out, or take GRPO or RLOO"
        )
    if module.anchor == "rollout" and module.importance is not None:
        raise UserError(
            "`anchor` is 'rollout', so the ratio itself corrects for what the engine sampled, and `importance` would"
            " correct twice; set `importance` to null"
        )
    if module.kl.in_reward and type(module).kl_penalty is None:
        raise UserError(f"`kl.in_reward` is true, and {name} has no rewards to take it off; set it to false")
    if module.reference is not None and module.kl.coef == 0:
        raise UserError(
            f"`reference.model` is {module.reference.model!r} and `kl.coef` is 0, so it would not be loaded; raise"
            " `kl.coef` or leave `reference` out"
        )


def check_updates(module: "PolicyGradient") -> None:
    """Refuse several updates a step where the algorithm makes one.

    Raises:
        UserError: The actor asks for them.
    """
    actor = module.actor
    if module.one_update and actor.several_updates:
        several = "epochs" if actor.epochs > 1 else "samples_per_update"
        raise UserError(
            f"`actor.{several}` is {getattr(actor, several)}, and {type(module).__name__} makes one update a step;"
            " leave it out"
        )
