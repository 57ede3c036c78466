"""The algorithms, one class per file."""

from .cispo import CISPO
from .cpgd import CPGD
from .dapo import DAPO
from .dpo import DPO
from .dppo import DPPO
from .dr_grpo import DrGRPO
from .gail import GAIL
from .gdpo import GDPO
from .gmpo import GMPO
from .gpg import GPG
from .grpo import GRPO
from .gspo import GSPO
from .maxrl import MaxRL
from .off_policy_sequence_masking import OffPolicySequenceMasking
from .on_policy_distillation import OnPolicyDistillation
from .opo import OPO
from .policy_gradient import PolicyGradient
from .ppo import PPO
from .raft import RAFT
from .reinforce import REINFORCE
from .reinforce_plus_plus import REINFORCEPlusPlus
from .reinforce_plus_plus_baseline import REINFORCEPlusPlusBaseline
from .remax import ReMax
from .reward_model_training import RewardModelTraining
from .rloo import RLOO
from .sapo import SAPO
from .self_distillation import SelfDistillation
from .self_play import SelfPlay
from .sft import SFT
from .tree_rl import TreeRL

__all__ = [
    "CISPO",
    "CPGD",
    "DAPO",
    "DPO",
    "DPPO",
    "GAIL",
    "GDPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "OPO",
    "PPO",
    "RAFT",
    "REINFORCE",
    "RLOO",
    "SAPO",
    "SFT",
    "DrGRPO",
    "MaxRL",
    "OffPolicySequenceMasking",
    "OnPolicyDistillation",
    "PolicyGradient",
    "REINFORCEPlusPlus",
    "REINFORCEPlusPlusBaseline",
    "ReMax",
    "RewardModelTraining",
    "SelfDistillation",
    "SelfPlay",
    "TreeRL",
]
