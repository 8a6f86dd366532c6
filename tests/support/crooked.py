"""A SuperNode that misbehaves below the app: whoever runs a node may send the SuperLink whatever he likes.

Everything up to the answer is Flower's own; how the answer to each order to train is sent is a trick of this file.
`fleets.crooked` makes a fleet start its nodes through `run_crooked`; only the one with partition-id 1 is crooked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode
from tests.support.lies import altered

from pfedgate.core.types import Update
from pfedgate.deploy.messages import from_records, to_records
from pfedgate.engine import wire


@dataclass(frozen=True)
class Announced:
    """A message whose header was sent: the objects the SuperLink wants of it, and under which name."""

    root: Any
    wanted: set[str]
    session: str
    run_id: int


class Post:
    """The node's way to the SuperLink, and the answers to train that the app has given so far."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.send: Any = None
        self.push_object: Any = None

    def announce(self, message: Any, root: Any = None) -> Announced:
        """Send a header; the message itself, or something else, is to follow."""
        root = root or message
        message.metadata.__dict__["_message_id"] = root.object_id
        wanted, session = self.send(message, get_object_tree(root), 0.0)
        if message.metadata.message_type == "train":
            print(f"crooked: answer {len(self.answers)}: {len(wanted)} objects wanted", flush=True)
        return Announced(root, wanted, session, message.metadata.run_id)

    def follow(self, announced: Announced, *, leave: int = 0) -> None:
        """Send what is wanted of it, without the last few objects."""
        objects = {
            name: one for name, one in get_all_nested_objects(announced.root).items() if name in announced.wanted
        }
        for name in list(objects)[: len(objects) - leave]:
            self.push_object(announced.run_id, announced.session, name, objects[name].deflate())

    def put(self, message: Any) -> None:
        """Send a message as it should be."""
        self.follow(self.announce(message))


def _with(message: Any, content: Any) -> Any:
    """The same answer to the same order, of other content."""
    return make_message(metadata=message.metadata, content=content)


def _louder(message: Any) -> Any:
    def ten(arrived: wire.Arrived) -> Update:
        update = arrived.update
        return Update(update.shared, 10 * update.weight, update.metrics)

    return _with(message, to_records(altered(from_records(message.content), ten)))


def honest(post: Post, answer: Any) -> None:
    """The answer, once."""
    post.put(answer)


def again(post: Post, answer: Any) -> None:
    """The very same answer twice, the second as early as can be: the SuperLink then wants all of it from that one."""
    first, second = post.announce(answer), post.announce(answer)
    post.follow(second if second.wanted else first)


def louder(post: Post, answer: Any) -> None:
    """Another answer to the same order right after the first: a valid one, of ten times the weight."""
    first, second = post.announce(answer), post.announce(_louder(answer))
    post.follow(first)
    post.follow(second)


def old(post: Post, answer: Any) -> None:
    """Every earlier answer once more, as it was, before and after this one."""
    earlier = post.answers[:-1]
    for message in (*earlier, answer, *earlier):
        post.put(message)


def last(post: Post, answer: Any) -> None:
    """What was the answer of the round before, as the answer to this one's order."""
    post.put(_with(answer, post.answers[-2].content))


def half(post: Post, answer: Any) -> None:
    """Some of the answer, and then nothing more: as if the line had gone dead."""
    post.follow(post.announce(answer), leave=1)


def no_message(post: Post, answer: Any) -> None:
    """A header that announces an answer, and under its id something that is none."""
    post.follow(post.announce(answer, ConfigRecord({"crooked": True})))


TRICKS = {trick.__name__: trick for trick in (honest, again, louder, old, last, half, no_message)}


def run_crooked(tricks: Sequence[str]) -> None:
    """Run a SuperNode with these tricks, one for each order to train; honest after the last of them."""
    if any("partition-id=1" in word for word in sys.argv):
        start_client_internal._push_messages = _pusher([TRICKS[name] for name in tricks])
    flower_supernode()


def _pusher(tricks: Sequence[Callable[[Post, Any], None]]) -> Any:
    post = Post()

    def push(state: Any, object_store: Any, send: Any, push_object: Any) -> None:
        """Instead of Flower's: wait for the app's answer, take all of it, and send it in the way of the trick."""
        post.send, post.push_object = send, push_object
        while not (replies := state.get_messages_legacy(is_reply=True)):
            time.sleep(0.2)
        for header in replies:
            answer = _whole(header, object_store)
            state.delete_messages(message_ids=[header.metadata.message_id, header.metadata.reply_to_message_id])
            object_store.delete(header.metadata.message_id)
            if header.metadata.message_type != "train":
                post.put(answer)
                continue
            post.answers.append(answer)
            at = len(post.answers) - 1
            (tricks[at] if at < len(tricks) else honest)(post, answer)

    return push


def _whole(header: Message, object_store: Any) -> Any:
    """The app's answer with its content, which comes after its header."""
    name, contents = header.metadata.message_id, {}
    for tree in iterate_object_tree(object_store.get_object_tree(name)):
        while not (content := object_store.get(tree.object_id)):
            time.sleep(0.1)
        contents[tree.object_id] = content
    return inflate_object_from_contents(name, contents)
