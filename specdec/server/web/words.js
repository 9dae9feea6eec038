// What the page says about its two modes, and their examples.

export const MODES = {
  chat: {
    title: "Ask something",
    label: "Message",
    says: "Each request sends the whole conversation.",
    unsuited: "This model continues text or code and is not trained for chat. Use Completion.",
    hint: "",
  },
  completion: {
    title: "Start a text",
    label: "Text to continue",
    says: "The model continues your text. Each text is a request of its own: earlier ones are not sent.",
    hint: "Completion: the model continues your text.",
  },
};

/** What the buttons put into the input; each shows the first line. */
export const CHAT_EXAMPLES = [
  "Write a function that reverses a list.",
  "Explain speculative decoding in three sentences.",
  "Compare Python's lists, tuples and sets in a table.",
];

export const COMPLETION_EXAMPLES = [
  "def fib(n):",
  'def parse_header(line):\n    """Parse a header line into a name and a value."""\n    name, sep, value = line.partition(":")\n',
  'class Stack:\n    """A stack of items, the last in being the first out."""\n\n    def __init__(self):\n',
  "def walk(top):\n    for name in os.listdir(top):\n        path = os.path.join(top, name)\n",
];
