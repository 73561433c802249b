"""What tests/faults/test_security.py runs as a process: commands of train.py and sample.py, while every
attempt to reach the network is counted.

    python tests/support/security_worker.py COMMANDS.json

Prints the attempts as its last line, first its own, which shows that it would see one, and ends with the
first exit status that is not 0.
"""

import contextlib
import json
import socket
import sys
from pathlib import Path

attempts = []


def count(event: str, arguments: tuple) -> None:
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        attempts.append(f"{event} {arguments!r}")
    elif event == "socket.connect" and not is_local(arguments[1]):
        attempts.append(f"{event} {arguments[1]!r}")


def is_local(address) -> bool:
    return not isinstance(address, tuple) or str(address[0]).startswith("127.") or address[0] == "::1"


sys.addaudithook(count)
with socket.socket() as own, contextlib.suppress(OSError):
    own.setblocking(False)
    own.connect(("192.0.2.1", 443))  # an address for examples, which nobody has
sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import sample  # noqa: E402
import train  # noqa: E402

for program, *arguments in json.loads(Path(sys.argv[1]).read_text()):
    status = sample.main(arguments) if program == "sample.py" else train.run(arguments)
    if status:
        break
print(json.dumps(attempts), flush=True)
sys.exit(status)
