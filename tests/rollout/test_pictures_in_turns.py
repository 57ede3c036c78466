"""A conversation whose prompt has a picture: the policy reads it at every turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rlflow.environments.bridge import PICTURE, PictureBridge, messages_of_prompt
from rlflow.environments.environment import defined
from rlflow.environments.session import Session
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError
from rlflow.models.tiny import write_tiny_vision_model
from rlflow.rollout import Sampling, TransformersEngine
from rlflow.rollout.conversation import Rules, converse
from rlflow.rollout.conversation_loop import run_alone
from tests.families.states import weights
from tests.families.towers import noise, reference, rows_of, scores
from tests.rollout.test_conversation_turns import Echo, Local
from tests.rollout.trained import setup


class Hint(Echo):
    """Says more with the prompt than there is in the dataset."""

    def reset(self, turns: int, place: int) -> str:  # type: ignore[override]
        super().reset(turns, place)
        return " Look!"


def test_the_policy_reads_the_picture_of_the_prompt_at_every_turn(tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "model")
    tokenizer, model, rows = AutoTokenizer.from_pretrained(folder), reference(folder), rows_of(folder)
    engine: Any = setup(TransformersEngine(), folder)
    engine.update_weights([weights(model)], 0)
    picture, row = noise(0, 40, 40), {"turns": 3, "place": 0}
    bridge = PictureBridge(TemplateBridge(tokenizer), [picture], rows.processor.expand)
    sampling = Sampling(6, 1.0, (tokenizer.eos_token_id, *bridge.ends))
    prompt = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "How many?"}]}]
    session = Session(defined(Hint), Local(Hint), row)
    rules = Rules("actor", max_turns=3, longest_prompt=80, longest=120, longest_turn=6)
    one = run_alone(
        converse(session, bridge, prompt, row, lambda turn: turn, rules),
        lambda turn: engine.step({0: turn}, sampling, 0)[0],
    )
    text = tokenizer.decode(one.prompt)
    around = "<fake_token_around_image>"
    shown = f"{around}<global-img>{'<image>' * 4}{around}"
    assert text.startswith(f"<|im_start|>user\n{shown}How many? Look!<|im_end|>\n")
    assert one.turns == 3
    scored = scores(model, rows, one.prompt + one.tokens, len(one.prompt), [picture])
    written = torch.tensor(one.written)
    torch.testing.assert_close(scored[written], torch.tensor(one.logprobs)[written], atol=1e-5, rtol=0)
    others = scores(model, rows, one.prompt + one.tokens, len(one.prompt), [noise(1, 40, 40)])
    last = torch.tensor(one.segments).cumsum(0)[-2]  # where the last turn begins
    assert float((others - scored)[last:].abs().max()) > 1e-3


def test_a_prompt_that_has_no_places_for_its_pictures_is_refused_by_the_engine(tmp_path: Path) -> None:
    folder = write_tiny_vision_model(tmp_path / "model")
    engine: Any = setup(TransformersEngine(), folder)
    engine.update_weights([weights(reference(folder))], 0)
    with pytest.raises(UserError, match=r"^a prompt has places for 0 features of its images, which have 4; if a node"):
        engine.generate([[65, 66]], [0], Sampling(2, 1.0, ()), 0, pictures=[[noise(0, 40, 40)]])


@pytest.mark.parametrize(
    ("part", "told"), [({"type": "image", "image": "a.png"}, "'image'"), ({"type": "audio"}, "'audio'")]
)
def test_a_part_of_a_prompt_that_no_model_reads_is_refused(part: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=rf"the prompt gave a content of type {told}, and only text is read"):
        messages_of_prompt([{"role": "user", "content": [PICTURE, part]}])
