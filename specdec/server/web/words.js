// What the page says of its two modes, and what they may begin with.

export const MODES = {
  chat: {
    title: "Ask something",
    label: "Message",
    says: "The model sees the whole conversation each time.",
    unsuited: "This model continues text or code and was not taught to chat: Completion suits it.",
    hint: "",
  },
  completion: {
    title: "Begin a text",
    label: "Text to be continued",
    says: "The model writes on where your text ends. Each text is continued by itself: nothing before it is sent.",
    hint: "Completion: the model continues your text.",
  },
};

export const CHAT_EXAMPLES = [
  ["Reverse a list", "Write a function that reverses a list."],
  ["Explain an idea", "Explain speculative decoding in three sentences."],
  ["Make a table", "Compare lists, tuples and sets of Python in a table."],
];

export const COMPLETION_EXAMPLES = [
  ["A header", 'def parse_header(line):\n    """Parse a header line into a name and a value."""\n    name, sep, value = line.partition(":")\n'],
  ["A stack", 'class Stack:\n    """A stack of items, the last in being the first out."""\n\n    def __init__(self):\n'],
  ["A walk", "def walk(top):\n    for name in os.listdir(top):\n        path = os.path.join(top, name)\n"],
  ["A cache", 'class LRUCache:\n    """A mapping that forgets what was not used lately."""\n\n    def __getitem__(self, key):\n'],
];
