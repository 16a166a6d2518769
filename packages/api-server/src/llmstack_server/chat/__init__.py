"""Conversations and their deltas, which all chat APIs share.

    conversation = Conversation(messages, tools=..., tool_choice=...)           # OpenAI's forms, whatever the API
    chat = await submit_chat(state, conversation, given, request_id=new_id("resp"))
    stream = ChatStream(*chat)                                                  # the base of each API's answer
    async with stream.outputs as outputs:                                       # closing it aborts the request
        async for output in outputs:
            for delta in stream.read(output): ...                               # ChatDelta: new text of one choice
    stream.usage.as_object()

`await stream.fold()` gives the whole answer instead, one `ChatMessage` per choice: the same deltas added up, so the two
ways of answering cannot differ. `render_conversation` gives the prompt alone, for counting tokens.

Each API encodes the deltas in its own form. Modules for requests: `conversation`, `tools` (checks), `turns` (messages
from the turns of other APIs), `prepare` (submission), `constraints` (required calls). Modules for answers: `stream`,
`reading` (calls and reasoning in the text), `reasoning` (its start and its tokens), `deltas`. `parsers` chooses the
parsers of a server.
"""
