"""How the model responds: in one turn, or in a conversation with an environment.

Token in, token out: what the model sampled is never tokenised again. Between two of its turns come the tokens that the
chat template writes there: the environment's messages, and what ends and begins a turn. A template that renders
earlier turns otherwise than the model wrote them is refused: nobody would have the conversations that are learnt.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.console import counted
from fsdp2kit.data.code import code_digests
from fsdp2kit.data.contents import Content
from fsdp2kit.data.conversation import check_tools, prompt_of
from fsdp2kit.data.messages import check_messages
from fsdp2kit.data.rendered import Rendered, Renderer
from fsdp2kit.data.rows import first_rows
from fsdp2kit.data.tokens import Prompt, encode_text
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import agreement, gather_objects
from fsdp2kit.model.tokenizer import build_tokenizer, turn_ends
from fsdp2kit.rl.engines.engine import Episode, Request, Response, RolloutEngine
from fsdp2kit.rl.environments.environments import Environments
from fsdp2kit.rl.prompts import Question
from fsdp2kit.rl.user_code import content_of_code

_KEY = "rollout.environment"
# Stand for the model's turns where the template is asked what it writes between them.
_THOUGHT = "fsdp2kit.thought"
_ANSWER = "fsdp2kit.answer"
_NUMBERS_OF_SEED = 5  # at most, of a question; a turn's own number follows

Messages = list[dict[str, Any]]


@dataclass
class _Talk:
    """A conversation under way."""

    number: int
    """Its environment's."""
    seed: tuple[int, ...]
    chat: dict[str, Any]
    """What `prompt_of` takes beside messages."""
    asked: Messages
    prompt: list[int]
    thinks: bool
    """Whether the template begins the model's turns within its reasoning."""
    said: Messages = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    is_whole: bool = False

    def add(self, ids: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Append tokens: with log-probabilities the model's, without them the environment's."""
        self.ids += ids
        self.log_probs += [0.0] * len(ids) if log_probs is None else log_probs
        self.sampled += [log_probs is not None] * len(ids)

    def request(self, seq_len: int) -> Request:
        """What the model is asked next."""
        seed = (*self.seed, *[0] * (_NUMBERS_OF_SEED - len(self.seed)), self.turns)
        return Request([*self.prompt, *self.ids], seed, room=seq_len - len(self.prompt) - len(self.ids))

    def response(self) -> Response:
        found = Episode(self.prompt, self.asked, self.said, self.sampled, self.reward)
        return Response(self.ids, self.log_probs, self.is_whole, found)


class Conversations(ExitStack):
    """Responses of a model, for `Generation`; a context manager, which ends the environments' process."""

    def __init__(self, config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start this rank's environments, if the run has any. Collective.

        Raises:
            UserError: the environment cannot be imported, or the tokenizer has no chat template.
        """
        super().__init__()
        self._section = config.rollout
        self._seq_len = config.data.seq_len
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # held while the tokenizer works: it is not made for several threads
        self._environments: Any = None
        self.contents: dict[str, Content] = {}
        """The source of the environment, by its key."""
        environment = config.rollout.environment
        if environment is None:
            return
        self._where = f"{_KEY}: {environment}"
        with agreement():
            if not tokenizer.chat_template:
                what = "the tokenizer has no chat template, which conversations need"
                raise UserError("model.chat_template", what, 'set one, such as "chatml"')
            self._environments = self.enter_context(Environments(config.rollout))
            content = content_of_code(environment, code_digests(environment), otherwise="another environment")
        self.contents[_KEY] = gather_objects(content)[0]  # rank 0's, as for rewards

    @property
    def has_environment(self) -> bool:
        """Whether responses take turns with an environment, and it rewards them."""
        return self._environments is not None

    def respond(self, questions: Sequence[Question], engine: RolloutEngine) -> list[Response]:
        """A response to each question. Collective among the ranks whose engines generate together.

        Raises:
            UserError: the environment fails, or the chat template cannot continue a conversation.
        """
        section = self._section
        options: Any = {"max_new_tokens": section.max_new_tokens, "temperature": section.temperature}
        if self._environments is None:
            return engine.generate([Request(one.prompt.ids, one.seed) for one in questions], **options)
        with engine.together(), ThreadPoolExecutor(section.batch_size) as pool:
            talks = list(pool.map(self.begin, questions))

        def go_on(at: int, turn: Response) -> Request | None:
            return self._go_on(talks[at], turn)

        engine.converse([one.request(self._seq_len) for one in talks], go_on, at_once=section.batch_size, **options)
        return [one.response() for one in talks]

    def begin(self, question: Question) -> _Talk:
        """A conversation as its environment begins it."""
        number = self._environments.open()
        row = question.prompt.row
        messages, tools = self._environments.reset(number, row)
        where = f"{self._where}: reset"
        variables = row.get("chat_template_kwargs") or {}
        if not isinstance(variables, Mapping):
            raise UserError(where, "chat_template_kwargs is no object", 'write {"enable_thinking": false}')
        chat = {"tools": check_tools(tools, where), "variables": variables, "where": where}
        asked = check_messages(messages, where, name="its messages")
        with self._lock:
            begun = self._chat(asked, chat)
            text = begun.text
        prompt = self._encode(text, begun)
        room = self._seq_len - self._section.max_new_tokens
        if not 0 < len(prompt) <= room:
            what = f"its messages have {len(prompt)} tokens, and data.seq_len − rollout.max_new_tokens leaves {room}"
            raise UserError(where, what, "begin with fewer, or use a larger data.seq_len")
        return _Talk(number, question.seed, chat, asked, prompt, thinks=text.rstrip().endswith("<think>"))

    def _go_on(self, talk: _Talk, turn: Response) -> Request | None:
        """What to ask after a turn of the model; None: the conversation is over.

        It is cut if the turn was, after `max_turns`, and where the environment's messages would leave no room.
        """
        talk.add(turn.ids, turn.log_probs)
        talk.turns += 1
        talk.said.append({"role": "assistant", "content": self._turn_text(turn)})
        if turn.is_whole:
            found = self._environments.step(talk.number, [*talk.asked, *talk.said])
            if isinstance(found, float):
                talk.reward = found
                talk.is_whole = True
            elif talk.turns < self._section.max_turns:
                messages = check_messages(found, f"{self._where}: step", name="its messages")
                between = self._between(talk, messages, stopped_at=turn.ids[-1])
                if len(talk.prompt) + len(talk.ids) + len(between) < self._seq_len:
                    talk.add(between)
                    talk.said += messages
                    return talk.request(self._seq_len)
        self._environments.close(talk.number)
        return None

    def text(self, response: Response) -> str:
        """A response's text, without special tokens."""
        with self._lock:
            return str(self._tokenizer.decode(response.ids, skip_special_tokens=True))

    def _turn_text(self, turn: Response) -> str:
        """What the model wrote, without the token that ends its turn."""
        with self._lock:
            return str(self._tokenizer.decode(turn.ids[: -1 if turn.is_whole else None]))

    def _between(self, talk: _Talk, messages: Messages, *, stopped_at: int) -> list[int]:
        """The tokens from after the end of the model's turn to the beginning of its next one.

        The model's own stop token, ``stopped_at``, is in the place of the template's. Where the template ends turns
        with the marker of the next role, another stop token does not say this role, so the marker follows it.

        The template is asked with stand-ins for the model's turns, so that no text of these matters. The text up to
        the last turn's beginning has to stand at the beginning of the text up to the next turn's.
        """
        thinks = talk.thinks or any("</think>" in one["content"] for one in talk.said if one["role"] == "assistant")
        turn = f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}" if thinks else _ANSWER
        said = [{**one, "content": turn} if one["role"] == "assistant" else one for one in talk.said]
        with self._lock:
            before = self._chat([*talk.asked, *said[:-1]], talk.chat).text
            ended = self._chat([*talk.asked, *said], talk.chat).text_of().rstrip().endswith(_ANSWER)
            going_on = self._chat([*talk.asked, *said, *messages], talk.chat)
            after = going_on.text
        written, _, rest = after[len(before) :].partition(_ANSWER)
        ids = self._encode(rest.lstrip(), going_on)
        is_kept = after.startswith(before) and (_THOUGHT in written or not thinks)
        if not is_kept or not {*ids[:1]} & {*turn_ends(self._tokenizer)}:
            changed = "renders earlier turns otherwise than the model writes them" + ", without reasoning" * thinks
            what = "ends the model's turns with no special token" if is_kept else changed
            todo = 'use one that keeps turns as they are, such as "chatml"'
            raise UserError("model.chat_template", f"{what}, so {_KEY} cannot go on after its first turn", todo)
        return ids if ended and ids[0] != stopped_at else ids[1:]

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self._tokenizer)

    def _chat(self, messages: Messages, chat: Mapping[str, Any]) -> Rendered:
        return self._renderer.render(prompt_of(messages, **chat))

    def _encode(self, text: str, rendered: Rendered) -> list[int]:
        """The token ids of a part of a conversation's text."""
        with self._lock:
            return encode_text(text, rendered, self._renderer)


def check_environment(config: RLConfig, *, missing: Collection[str]) -> dict[str, str | None]:
    """Import the environment, and have it begin a conversation about the first row.

    Args:
        missing: what is not on this machine: TOML keys of data, "tokenizer".

    Returns:
        As `Section.offline`.

    Raises:
        UserError: it cannot be imported, or its messages are not what the chat template takes.
    """
    name = config.rollout.environment
    if name is None:
        return {}
    if {"data.path", "tokenizer"} & {*missing} or config.data.path is None:
        with Environments(config.rollout):
            return {_KEY: f"environment: {name}, imported"}
    tokenizer = build_tokenizer(config.model, local_files_only=True)
    [row] = first_rows(config.data, "data.path", 1)
    with Conversations(config, tokenizer) as conversations:
        talk = conversations.begin(Question(Prompt(row.parse(), [], []), (0,)))
    tools = counted(len(talk.chat["tools"] or ()), "tool")
    return {_KEY: f"environment: {name}, imported; it begins with {counted(len(talk.prompt), 'token')}, {tools}"}
