"""Claude through the `anthropic` SDK: many requests at once, answers that can be trusted, nothing paid twice.

    claude = Claude(os.environ["ANTHROPIC_API_KEY"], cache="replies.jsonl", budget=5.0)
    claude.check("claude-haiku-5-5")
    question = Request([{"role": "system", "content": "..."}, {"role": "user", "content": "..."}], max_tokens=1024)
    replies = claude.complete([question], "claude-haiku-5-5")

Imported only where Claude is used. Copy it together with the section "judges that are language models" of rewards.py.
Left out: streaming, tools, batches. No sampling parameters and no prefill: current models refuse them.

Where danger is:
1. What cannot heal (key, credit, model, spending limit) raises Stop at once; what may (429, 5xx, timeouts, nonsense) costs one
   Reply(None, reason), and Stop only when more than half of the last 200 failed. No failure becomes an answer.
2. The SDK retries twice and nobody else does: a loop of our own around it would multiply requests. It obeys any Retry-After,
   so a deadline stands around all its tries.
3. The key sits in the SDK's requests and errors. Neither is kept, chained or printed; texts of a server may repeat it.
"""
import asyncio
import hashlib
import ipaddress
import json
import os
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import anthropic

from rewards import Reply, Request, Stop, Tally, checked

# Dollars per million tokens in and out. Reading a cached prompt costs a tenth of its input, writing it a quarter more.
PRICES = {"claude-haiku-5-5": (0.10, 0.50), "claude-sonnet-5-5": (2, 10), "claude-sonnet-4-6": (3, 15), "claude-haiku-4-5-20251001": (1, 5)}
PRICED_ON = "2026-11-29"
# For estimates only. Counted on our requests with the last tokenizer that was published (anthropic 0.38, of Claude 2): 3.0 to 3.5.
CHARACTERS_PER_TOKEN = 3.0
ADVICE = {401: "the key was refused, check ANTHROPIC_API_KEY", 402: "there is no credit, see the billing page of the console",
          403: "this key may not do that", 404: "there is no such model (any more), name another"}


def dollars(model: str, usage: dict) -> float | None:
    """What the tokens of one answer cost; None if the price is not known.

    >>> round(dollars("claude-haiku-5-5", {"input_tokens": 100, "cache_read_input_tokens": 1000, "output_tokens": 200}), 8)
    0.00012
    """
    if model not in PRICES:
        return None
    price_in, price_out = PRICES[model]
    tokens = [usage.get(key) or 0 for key in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")]
    return sum(n * price for n, price in zip(tokens, (price_in, 1.25 * price_in, 0.1 * price_in, price_out))) / 1e6


def read_message(body: str) -> Reply:
    """The body of a 200 as a Reply. Complete is what ended by end_turn or stop_sequence; a refusal is a 200 too."""
    try:
        message = json.loads(body)
        usage = {key: value for key, value in message["usage"].items() if type(value) is int}
        stop, model = message["stop_reason"], message["model"]
        text = "".join(block["text"] for block in message["content"] if block["type"] == "text")  # thinking may come first
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Reply(None, "unreadable answer")
    if stop not in ("end_turn", "stop_sequence"):
        return Reply(None, str(stop), usage, model)
    return Reply(text, "", usage, model) if text.strip() else Reply(None, "empty answer", usage, model)


class Claude:
    """One client for a whole run; for one thread.

    key: stripped, never shown. base_url: of a compatible server; empty: ANTHROPIC_BASE_URL, or Anthropic's own. cache: file of
    answers, shared by runs and processes; empty: none. budget: dollars that this client may spend; 0: no limit. deadline: seconds
    for a request with all its retries. Raises Stop for a key or address that cannot work.
    """

    def __init__(self, key: str | None, base_url: str = "", cache: str = "", budget: float = 0.0, deadline: float = 300.0,
                 in_flight: int = 64):
        self._key = (key or "").strip()
        if not self._key:
            raise Stop("ANTHROPIC_API_KEY is not set; set it, or do without Claude")
        if not self._key.isascii() or not self._key.isprintable() or " " in self._key:
            raise Stop("ANTHROPIC_API_KEY is no key: it holds blanks or signs that no key has")
        url = (base_url or os.environ.get("ANTHROPIC_BASE_URL") or "https://api.anthropic.com").strip().rstrip("/").removesuffix("/v1")
        parts = split_address(url)
        if parts is None:
            raise Stop("the base URL must be of the form https://HOST/PATH, without a password in it")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise Stop(f"the base URL speaks plain http to {parts.hostname}: only this machine itself may be asked so, others with https")
        self.host, self.url = parts.netloc, url
        self.deadline, self.budget, self.in_flight = deadline, budget, in_flight
        self.cache = Path(cache) if cache else None
        self.known = self._read_cache()  # everything is in memory: some hundred bytes an answer
        # One loop for the client's whole life: over several asyncio.run() an AsyncAnthropic fails, and its retries hide that.
        self.loop = asyncio.new_event_loop()
        self.client = anthropic.AsyncAnthropic(api_key=self._key, base_url=url, timeout=deadline / 3, max_retries=2)
        self.tally = Tally(f"requests to {self.host}")
        self.counts: Counter = Counter()
        self.spent: float | None = 0.0  # None: the price of some model is unknown
        self.reserved: list[float] = []  # what each request in flight may cost at most; kept where there is a budget
        self.models: set[str] = set()   # as the answers name them
        self.checked: set[str] = set()

    def check(self, model: str) -> str:
        """Stop unless this model can be asked. Returns what a person should know about it, "" if nothing. A server without a list of
        models is taken at its word."""
        if not model.strip():
            raise Stop("the name of the model is empty")
        if self.budget and model not in PRICES:
            raise Stop(f"the price of {model} is unknown, so a budget cannot be kept; known are {', '.join(PRICES)}")
        found, reason, hopeless = self.loop.run_until_complete(self._try(lambda: self.client.models.retrieve(model)))
        if found is None and (hopeless != 404 or "not_found_error" in reason):
            raise Stop(f"{model} at {self.host}: {reason}")
        state, end = getattr(found, "lifecycle", None), getattr(found, "retires_at", None)  # a compatible server may not say
        if state == "retired":
            raise Stop(f"{model} at {self.host} was retired, name another")
        self.checked.add(model)
        return f"{model} retires on {end:%Y-%m-%d}" if state == "deprecated" and end else ""

    def complete(self, requests: list[Request], model: str) -> list[Reply]:
        """One reply a request, in their order, at most `in_flight` at a time; equal requests are asked once, answered ones never
        again. A request that fails is Reply(None, reason); Stop for what will not heal, then whatever had arrived is kept."""
        bodies = [self._body(request, model) for request in requests]
        keys = [hashlib.sha256(json.dumps([self.url, body, request.draw], sort_keys=True).encode()).hexdigest()
                for body, request in zip(bodies, requests)]
        replies = {key: self.known[key] for key, request in zip(keys, requests)
                   if key in self.known and checked(self.known[key], request).text is not None}
        self.counts["cached"] += len(replies)
        self.models |= {reply.model for reply in replies.values()}
        missing = {key: (body, request) for key, body, request in zip(keys, bodies, requests) if key not in replies}
        if missing:
            replies |= self.loop.run_until_complete(self._ask_all(missing))
        return [replies[key] for key in keys]

    def report(self) -> dict:
        """Counts so far, for a log."""
        counts = {f"claude_{name}": self.counts[name] for name in ("requests", "cached", "failed", "tokens_in", "tokens_out")}
        return {**counts, "claude_dollars": self.spent, "claude_models": sorted(self.models)}

    def __str__(self) -> str:
        c, cost = self.counts, "price unknown" if self.spent is None else f"${self.spent:.4f}"
        return (f"{', '.join(sorted(self.models)) or 'Claude'} at {self.host}: {c['requests']} requests, {c['failed']} failed, "
                f"{c['cached']} more from the cache; {c['tokens_in']} tokens in ({c['tokens_cached']} of them cached), {c['tokens_out']} out; {cost}")

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):  # left by a second Ctrl-C
            task.cancel()
        self.loop.run_until_complete(self.client.close())
        self.loop.close()

    # -- one request

    def _body(self, request: Request, model: str) -> dict:
        """The request as it goes over the wire. The system part is the constant one, so it is marked for Claude's prompt cache."""
        system, *messages = request.messages
        config: dict = {"effort": "low"}
        if request.schema:
            config["format"] = {"type": "json_schema", "schema": request.schema}
        return {"model": model, "max_tokens": request.max_tokens, "messages": messages, "output_config": config,
                "system": [{"type": "text", "text": system["content"], "cache_control": {"type": "ephemeral"}}]}

    async def _ask_all(self, missing: dict) -> dict:
        slots, room, halted = asyncio.Semaphore(self.in_flight), asyncio.Condition(), asyncio.Event()

        async def one(key, body, request):
            async with slots:
                if halted.is_set():
                    return Reply(None, "not asked")
                try:
                    reply = await self._within_budget(room, body, request)
                    if reply.text is not None:
                        self._keep(key, reply)
                except Stop:
                    halted.set()  # nothing more is asked; what is on its way may be paid for and gets ten seconds to arrive
                    raise
            return reply

        tasks = {key: asyncio.ensure_future(one(key, *what)) for key, what in missing.items()}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            await asyncio.wait(tasks.values(), timeout=10)
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {key: task.result() for key, task in tasks.items()}

    async def _within_budget(self, room, body: dict, request: Request) -> Reply:
        """Ask, unless even the dearest answer could exceed the budget. A token is at least one byte, so bytes bound the input."""
        if not self.budget:
            return await self._ask(body, request)
        most = dollars(body["model"], {"cache_creation_input_tokens": len(json.dumps(body)), "output_tokens": request.max_tokens})
        async with room:
            await room.wait_for(lambda: self.spent + sum(self.reserved) + most <= self.budget or not self.reserved)
            if self.spent + most > self.budget:
                raise Stop(f"the budget of ${self.budget:g} is spent up to ${self.spent:.4f}, and the next request could exceed it")
            self.reserved.append(most)
        try:
            return await self._ask(body, request)
        finally:
            self.reserved.remove(most)
            async with room:
                room.notify_all()

    async def _ask(self, body: dict, request: Request) -> Reply:
        raw, reason, hopeless = await self._try(lambda: self.client.messages.with_raw_response.create(**body))
        if hopeless:
            raise Stop(f"{body['model']} at {self.host}: {reason}")
        reply = Reply(None, reason) if raw is None else checked(read_message(await raw.text()), request)
        reply = reply._replace(reason=self._plain(reply.reason))
        usage = reply.usage or {}
        cached = usage.get("cache_read_input_tokens", 0)
        self.counts.update(requests=1, failed=int(reply.text is None), tokens_cached=cached, tokens_out=usage.get("output_tokens", 0),
                           tokens_in=usage.get("input_tokens", 0) + usage.get("cache_creation_input_tokens", 0) + cached)
        cost = dollars(body["model"], usage)
        self.spent = None if cost is None or self.spent is None else self.spent + cost  # failed answers are paid too
        self.models |= {reply.model} - {""}
        self.tally(reply.text is None, reply.reason)
        return reply

    async def _try(self, call) -> tuple:
        """(result, "", 0), or (None, reason, 0), or (None, reason, status) for what no waiting heals."""
        try:
            return await asyncio.wait_for(call(), self.deadline), "", 0
        except asyncio.TimeoutError:
            return None, f"no answer within {self.deadline:g} s", 0
        except anthropic.APIStatusError as error:
            code = error.error_code or error.type or ""
            reason = self._plain(f"HTTP {error.status_code} {code}: {error.api_message or error.message}")
            if error.status_code in ADVICE or "spend_limit" in code or code in ("organization_on_hold", "billing_error"):
                advice = ADVICE.get(error.status_code, "that has to be settled in the console first")
                return None, f"{advice} ({reason})", error.status_code
            return None, reason, 0
        except anthropic.AnthropicError as error:
            return None, self._plain(f"{type(error).__name__}: {error}"), 0
        except ValueError as error:  # a body that the SDK cannot read
            return None, self._plain(f"unreadable answer ({error})"), 0

    def _plain(self, text: str) -> str:
        """One line without the key."""
        return " ".join(text.replace(self._key, "[key]").split())[:300]

    # -- the cache: a line of JSON an answer, successes only

    def _read_cache(self) -> dict[str, Reply]:
        known = {}
        if self.cache:
            try:
                self.cache.parent.mkdir(parents=True, exist_ok=True)
                lines = self.cache.read_bytes().split(b"\n") if self.cache.exists() else []
            except OSError as error:
                raise Stop(f"the cache {self.cache} cannot be used: {error}") from None
            for line in lines:
                try:
                    record = json.loads(line)
                    known[record["key"]] = Reply(record["text"], "", record["usage"], record["model"])
                except (ValueError, TypeError, KeyError):
                    continue  # a blank line, or one that a killed process left unfinished
        return known

    def _keep(self, key: str, reply: Reply) -> None:
        self.known[key] = reply
        if self.cache:
            record = {"key": key, "text": reply.text, "usage": reply.usage, "model": reply.model}
            # One write() to the end of the file, and a line feed before it too: other processes may be writing, or have died writing.
            try:
                with open(self.cache, "ab", buffering=0) as file:
                    file.write(b"\n" + json.dumps(record).encode() + b"\n")
            except OSError as error:
                raise Stop(f"the cache {self.cache} cannot be written: {error}") from None


def split_address(url: str):
    """The parts of an http address, None if it is none or holds a name, a password or a query."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True) and "@" not in parts.netloc and not parts.query
    except ValueError:
        return None
    return parts if good else None


def is_loopback(host: str) -> bool:
    """Is it this machine?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
