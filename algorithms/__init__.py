"""The algorithms, one class per file."""

from rlflow.algorithms.cispo import CISPO
from rlflow.algorithms.cpgd import CPGD
from rlflow.algorithms.dapo import DAPO
from rlflow.algorithms.dpo import DPO
from rlflow.algorithms.dr_grpo import DrGRPO
from rlflow.algorithms.gmpo import GMPO
from rlflow.algorithms.gpg import GPG
from rlflow.algorithms.grpo import GRPO
from rlflow.algorithms.gspo import GSPO
from rlflow.algorithms.on_policy_distillation import OnPolicyDistillation
from rlflow.algorithms.opo import OPO
from rlflow.algorithms.policy_gradient import PolicyGradient
from rlflow.algorithms.ppo import PPO
from rlflow.algorithms.reinforce_plus_plus import REINFORCEPlusPlus
from rlflow.algorithms.reinforce_plus_plus_baseline import REINFORCEPlusPlusBaseline
from rlflow.algorithms.remax import ReMax
from rlflow.algorithms.reward_model_training import RewardModelTraining
from rlflow.algorithms.rloo import RLOO
from rlflow.algorithms.sft import SFT

__all__ = [
    "CISPO",
    "CPGD",
    "DAPO",
    "DPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "OPO",
    "PPO",
    "RLOO",
    "SFT",
    "DrGRPO",
    "OnPolicyDistillation",
    "PolicyGradient",
    "REINFORCEPlusPlus",
    "REINFORCEPlusPlusBaseline",
    "ReMax",
    "RewardModelTraining",
]
