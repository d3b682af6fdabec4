"""The formats of rows, one a file: each reads a row's columns straight down to what is tokenised of it.

`table` joins them by their names in ``data.format``, but for `prompts`, which the model answers itself. A chat, for
example: `chat` takes the columns with messages, `fsdp2kit.data.messages` makes them OpenAI's, and
`fsdp2kit.data.conversation` adds what every row may give to its conversation: a system prompt, tools, variables of the
chat template.
"""
