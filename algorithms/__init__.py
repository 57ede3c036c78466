"""The algorithms, one class per file."""

from .cispo import CISPO as CISPO
from .cpgd import CPGD as CPGD
from .dapo import DAPO as DAPO
from .dpo import DPO as DPO
from .dppo import DPPO as DPPO
from .dr_grpo import DrGRPO as DrGRPO
from .gail import GAIL as GAIL
from .gdpo import GDPO as GDPO
from .gmpo import GMPO as GMPO
from .gpg import GPG as GPG
from .grpo import GRPO as GRPO
from .gspo import GSPO as GSPO
from .kto import KTO as KTO
from .maxrl import MaxRL as MaxRL
from .off_policy_sequence_masking import OffPolicySequenceMasking as OffPolicySequenceMasking
from .on_policy_distillation import OnPolicyDistillation as OnPolicyDistillation
from .opo import OPO as OPO
from .policy_gradient import PolicyGradient as PolicyGradient
from .ppo import PPO as PPO
from .raft import RAFT as RAFT
from .reinforce import REINFORCE as REINFORCE
from .reinforce_plus_plus import REINFORCEPlusPlus as REINFORCEPlusPlus
from .reinforce_plus_plus_baseline import REINFORCEPlusPlusBaseline as REINFORCEPlusPlusBaseline
from .remax import ReMax as ReMax
from .reward_model_training import RewardModelTraining as RewardModelTraining
from .rloo import RLOO as RLOO
from .sapo import SAPO as SAPO
from .score_centering import ScoreCentering as ScoreCentering
from .self_distillation import SelfDistillation as SelfDistillation
from .self_play import SelfPlay as SelfPlay
from .sft import SFT as SFT
from .simpo import SimPO as SimPO
from .tree_rl import TreeRL as TreeRL

__all__ = [name for name, each in vars().items() if isinstance(each, type)]
