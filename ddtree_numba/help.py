"""What --help says around the list of options."""

USAGE = """python -m ddtree_numba.generate PROMPT [options]
       python -m ddtree_numba.generate - | --prompt-file FILE [options]
       python -m ddtree_numba.generate --input FILE.jsonl --output FILE.jsonl [options]
       python -m ddtree_numba.generate --model DIR --plan [--tp N] [--card-gib GIB]"""

DESCRIPTION = """\
Continues a text with a Kimi K2 model, several tokens a round: a small drafter proposes, DDTree
arranges the likeliest continuations as a tree, the model verifies the tree in one pass. The output
is that of plain decoding, token for token. Without --model, the small embedded model continues
Python code."""

EPILOG = """\
prompts
  PROMPT, --prompt-file and - give the same ids for the same bytes: UTF-8; a byte order mark at the
  start and ONE line ending at the end are dropped (write two to keep one); all else is kept, CRLF
  too. An empty prompt is refused. Standard input is read only for -, so for a literal dash use
  --prompt-file; a longer PROMPT that begins with a dash goes last, behind --. Without --chat the
  text is continued as it is, with nothing put before it.

output
  The answer alone goes to standard output, as it comes; all else goes to standard error. On a
  terminal, --show-tree keeps the answer back until the end. It draws a round's tree below its root,
  the last token so far: * marks the accepted path, + the bonus token, which is the model's own next
  choice, and a percentage is the drafter's probability of the whole path down to a node.
  Tokens per round: emitted tokens divided by rounds; the bonus token of each round is one of them.
  Tokens per second: emitted tokens divided by the time of decoding, without loading, prefill and
  the rounds, with their tokens, in which a CUDA graph is made; undefined (null) below two tokens.
  --json: text token_ids finish_reason prompt_tokens completion_tokens rounds tokens_per_round
  tokens_per_second mode budget backend seed; with --thinking also reasoning; if it failed, error.
  finish_reason is stop, length, cancelled or error. The last token id is the one that ended the
  answer, although a stop token or stop string gives no text.

--input and --output
  An input line is a JSON string, or an object with one of prompt (text), token_ids (without --chat)
  or messages (with --chat); its other keys are ignored. Messages may come with tools, a list that
  is handed to the model's template, as TypeScript where it asks for that; calls then stand in the
  answer's text. A result is appended as soon as it is there: index (number of the record, from 0),
  the fields of --json, prefill_seconds, decode_seconds, setup_seconds (making CUDA graphs).
  Started again, the command drops a torn last line and skips what the output holds, failed records
  too: delete their lines to try them again.

ranks
  --tp N cuts the model into N ranks: a process each where each can have a GPU, else threads on
  numpy. --backend cuda --ranks threads runs all of them on one GPU. Processes that a launcher
  started on one host or several, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
  set, are ranks without further options. Rank 0 reads and prints; the first failure of any rank is
  shown and ends all. NCCL, for several hosts and --fast-allreduce: pip install nvidia-nccl-cu13.

environment
  DDTREE_NUMBA_CACHE_DIR     compiled kernels and step times (~/.cache/ddtree_numba)
  DDTREE_NUMBA_MEETING       where ranks with GPUs meet: device, host or nccl (the first that works)
  DDTREE_NUMBA_RANK_SECONDS  how long a rank may be silent (60)
  DDTREE_NUMBA_CHECK_RANKS   compare what ranks hold every so many rounds (0: never)

An option that would have no effect with the others is refused.

exit codes
  0    all answered
  1    a checkpoint that cannot be used, an error while decoding, in one line (--debug: with
       traceback); a difference found by --check; an error in any record of --output
  2    options or prompt refused, before any weight was read
  130  Ctrl-C: stopped after the current round, what was made is printed; again: stopped at once
  143  the same by SIGTERM
  141  whoever read standard output went away

examples
  python -m ddtree_numba.generate 'def fibonacci(n):'
  python -m ddtree_numba.generate 'import os' --max-new-tokens 40 --show-tree
  python -m ddtree_numba.generate --prompt-file a.py --temperature 0.8 --top-p 0.95 --seed 7 --check
  git diff | python -m ddtree_numba.generate - --json --stop $'\\n\\n'
  python -m ddtree_numba.generate --model DIR --drafter DIR --tp 8 --chat 'Why is the sky blue?'"""
