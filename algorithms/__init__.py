"""The algorithms, one class per file."""

from .cispo import CISPO
from .cpgd import CPGD
from .dapo import DAPO
from .dpo import DPO
from .dppo import DPPO
from .dr_grpo import DrGRPO
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
from .reinforce import REINFORCE
from .reinforce_plus_plus import REINFORCEPlusPlus
from .reinforce_plus_plus_baseline import REINFORCEPlusPlusBaseline
from .remax import ReMax
from .reward_model_training import RewardModelTraining
from .rloo import RLOO
from .sapo import SAPO
from .sft import SFT

__all__ = [
    "CISPO",
    "CPGD",
    "DAPO",
    "DPO",
    "DPPO",
    "GDPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "OPO",
    "PPO",
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
]
