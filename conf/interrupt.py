"""Ctrl-C while a command is still importing torch: it ends with exit code 130, without a traceback.

Commands import this first. `user_errors_in_one_line` (conf/errors.py) restores KeyboardInterrupt when they start.
"""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a shell's background job
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
