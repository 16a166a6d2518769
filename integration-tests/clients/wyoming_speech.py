"""Home Assistant's protocol: a voice assistant sends sound to the bridge wyoming-openai. URL, model, a WAV file."""

import asyncio
import json
import socket
import sys
import wave

from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.info import Describe, Info


async def connected(port: int) -> AsyncTcpClient:
    """A client, as soon as the bridge listens."""
    for _ in range(600):
        client = AsyncTcpClient("127.0.0.1", port)
        try:
            await client.connect()
        except OSError:
            await asyncio.sleep(0.1)
        else:
            return client
    raise SystemExit("the bridge does not listen")


async def main(url: str, model: str, path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = ["--uri", f"tcp://127.0.0.1:{port}", "--stt-openai-url", url, "--stt-openai-key", "none"]
    options += ["--stt-models", model, "--languages", "en", "--stt-temperature", "0"]
    bridge = await asyncio.create_subprocess_exec(sys.executable, "-m", "wyoming_openai", *options)
    try:
        client = await connected(port)
        await client.write_event(Describe().event())
        while not Info.is_type((event := await client.read_event()).type):
            continue
        names = [one.name for program in Info.from_event(event).asr for one in program.models]
        with wave.open(path) as file:
            form = {"rate": file.getframerate(), "width": file.getsampwidth(), "channels": file.getnchannels()}
            await client.write_event(Transcribe(name=model, language="en").event())
            await client.write_event(AudioStart(**form).event())
            while data := file.readframes(8000):
                await client.write_event(AudioChunk(audio=data, **form).event())
            await client.write_event(AudioStop().event())
        while not Transcript.is_type((event := await client.read_event()).type):
            continue
        print(json.dumps({"text": Transcript.from_event(event).text, "models": names}))
        await client.disconnect()
    finally:
        bridge.terminate()
        await bridge.wait()


asyncio.run(main(*sys.argv[1:]))
