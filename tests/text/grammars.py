"""What grammars accept, without their processes."""

import json
from typing import Any

from specdec.text.grammar.child import Vocabulary, compile_grammar
from specdec.text.grammar.wire import Job, Kind


def accepts(vocabulary: Vocabulary, kind: str, source: Any, text: str) -> bool:
    """Return whether a text is a whole output of a grammar."""
    source = source if isinstance(source, str) else json.dumps(source)
    follower = compile_grammar(vocabulary, kind, source)
    answer = follower.answer(Job(0, vocabulary.tokenizer.tokenize_str(text), [(), (0,)]))
    assert answer
    return answer[-1] == Kind.OVER
