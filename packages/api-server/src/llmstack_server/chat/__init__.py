"""The seam of all chat APIs: a conversation in, a stream of deltas out; each API is an encoder over it.

    conversation = Conversation(messages, tools=..., tool_choice=...)           # OpenAI's forms, whatever the API
    stream = await prepare_chat_generation(state, conversation, params, request_id=new_id("resp"))
    async with aclosing(stream.deltas()) as deltas:                             # leaving it aborts the request
        async for delta in deltas: ...                                          # ChatDelta: what is new in one choice
    stream.usage.as_object()

`await stream.fold()` gives the whole answer instead, one `ChatMessage` per choice: the same deltas added up, so the two
ways of answering cannot differ. `render_conversation` gives the prompt alone, for counting tokens.

What is asked: `conversation`, `tools` (their checks), `turns` (messages from the turns of other APIs). On the way down:
`prepare`, `constraints` (calls that must be made). On the way up: `stream`, `reading` (calls and reasoning out of the
text), `reasoning` (where it begins, what it costs), `deltas`. Of the server: `options` (flags), `parsers` (which ones).
"""
