"""`python dev.py serve`: a ComfyUI with the pack and its demo models, until Ctrl-C."""

import argparse
import signal
import sys

from comfy_server import DEV, ComfyServer, port_is_taken


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8188)
    options, rest = parser.parse_known_args()
    if port_is_taken(options.port):
        print(f"Port {options.port} is taken: stop what uses it, or choose another with --port.")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = ComfyServer(DEV / "home", port=options.port, arguments=tuple(rest))
    print("Starting ComfyUI ...", flush=True)
    try:
        with server:
            print(f"ComfyUI with the pack: {server.url}\nLog: {server.log_file}\nCtrl-C ends it.", flush=True)
            server.process.wait()
    except KeyboardInterrupt:
        print("\nStopped.")
        return 0
    except RuntimeError as error:
        print(error)
    print(f"ComfyUI ended on its own: read {server.log_file} and run the same command again.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
