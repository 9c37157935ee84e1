"""`make demo`: fetches the model, starts a stack of separate processes, streams one answer, stops.

Standard library only: everything is done by the command `twostroke`, as a person would.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TWOSTROKE = str(Path(sys.executable).with_name("twostroke"))
QUESTION = "Why is the sky blue? Answer in two or three sentences."
START_S = 180  # most time from start to readiness
STOP_S = 60


def say(text: str) -> None:
    """A headline."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def wait_until_serving(stack: "subprocess.Popen[str]") -> str:
    """Reads the supervisor's events up to the one that names the gateway's address."""
    for line in stack.stdout or ():
        event = json.loads(line)
        if event["event"] == "started":
            print(f"  {event['name']:<10} process {event['pid']} starts", flush=True)
        elif event["event"] == "ready":
            print(f"  {event['name']:<10} ready after {event['after_s']:.1f} s", flush=True)
        elif event["event"] == "serving":
            return str(event["address"])
    raise SystemExit(f"the stack ended with code {stack.wait()}; the lines above say why")


def stop(stack: "subprocess.Popen[str]") -> int:
    """SIGTERM, as Ctrl-C would; kills what does not end."""
    if stack.poll() is None:
        stack.send_signal(signal.SIGTERM)
    try:
        return stack.wait(STOP_S)
    except subprocess.TimeoutExpired:
        stack.kill()
        raise SystemExit("the stack did not stop") from None


def main() -> int:
    """The exit code: 0 only if an answer came and everything stopped cleanly."""
    begun = time.monotonic()
    say("1. The model")
    subprocess.run([TWOSTROKE, "models", "pull"], check=True)
    say("2. The stack: a gateway, a prefill worker, a decode worker")
    command = [TWOSTROKE, "up", "--json", "--listen", "127.0.0.1:0", "--log-level", "error"]
    stack = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(stack.pid, signal.SIGTERM))
    signal.alarm(START_S)
    try:
        address = wait_until_serving(stack)
        signal.alarm(0)
        say(f"3. An answer: twostroke generate --address {address} {QUESTION!r}")
        asked = subprocess.run(
            [TWOSTROKE, "generate", "--address", address, "--temperature", "0", "--max-tokens", "100", QUESTION],
            timeout=120,
        )
    finally:
        code = stop(stack)
    if asked.returncode or code:
        print(f"demo failed: generate ended with {asked.returncode}, the stack with {code}", file=sys.stderr)
        return 1
    say(f"All stopped. That took {time.monotonic() - begun:.0f} s. Your turn: {VENV_BIN}/twostroke up")
    return 0


VENV_BIN = os.path.relpath(Path(sys.executable).parent)

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
