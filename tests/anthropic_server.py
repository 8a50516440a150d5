"""A stand-in for Claude's API on loopback: strict about the protocol as SDK 2.14 speaks it, with faults by script.

    with Server(delay=0.05) as server:             # or: python tests/anthropic_server.py --delay 0.25, which prints its address
        Claude(KEY, server.url).complete(...)
        server.requests, server.answered, server.peak

It checks what our code sends; what the real service answers is modelled from documentation. Standard library only.
"""
import argparse
import hashlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-test-planted-key-0123456789"
VERSION = "2026-10-21"
MODELS = {"claude-haiku-5-5": "active", "claude-sonnet-4-6": "active", "claude-sonnet-4-5-20250929": "deprecated",
          "claude-of-next-year": "active", "claude-old-and-listed": "retired"}  # claude-sonnet-4-20250514 is gone: 404
RETIRES = {"deprecated": "2026-11-30T00:00:00Z", "retired": "2026-06-15T00:00:00Z"}
FIELDS = {"model", "max_tokens", "messages", "system", "output_config", "thinking", "stop_sequences", "metadata", "tools",
          "tool_choice", "service_tier", "cache_control"}
DIMENSIONS = ("relevance", "precision_clarity", "specificity", "logical_connection", "constructive")
ERRORS = {400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error",
          404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 529: "overloaded_error"}
# Statuses with more than a number: (status, headers, error code).
SPECIAL = {"429-later": (429, {"Retry-After": "1"}, None), "429-never": (429, {"Retry-After": "86400"}, None),
           "spend": (429, {"x-should-retry": "false"}, "enforced_spend_limit_reached"),
           "contract": (429, {}, "contract_spend_limit_reached"), "hold": (400, {}, "organization_on_hold")}
# All that a second try may heal or that spoils one answer. "thinking" is no fault: a thinking block before the text.
FAULTS = ("429", "429-later", "500", "529", "stall", "drop", "html", "truncated", "refusal", "max_tokens", "pause_turn", "new_value",
          "empty", "wrong shape", "no json", "six", "missing")


def scores_of(text: str) -> dict:
    """The default judge: five scores from the hash of the question, so that equal questions get equal scores."""
    digest = hashlib.sha256(text.encode()).digest()
    return dict(zip(DIMENSIONS, (1 + byte % 5 for byte in digest)))


def judge_answer(body: dict) -> str:
    """Scores for a request that holds a question; a fixed text for any other."""
    text = body["messages"][-1]["content"]
    if "<question>" in text:
        return json.dumps({**scores_of(json.loads(text.split("<question>\n")[1].split("\n</question>")[0])), "why": "by hash"})
    return "Hello."


def complaint(body) -> str | None:
    """What the real service would refuse in the body of POST /v1/messages, None if nothing."""
    if not isinstance(body, dict) or not {"model", "max_tokens", "messages"} <= set(body):
        return "model, max_tokens and messages are required"
    if sampling := {"temperature", "top_p", "top_k"} & set(body):
        return f"{sampling} is no longer supported"
    if unknown := set(body) - FIELDS:
        return f"{unknown}: extra inputs are not permitted"
    if type(body["max_tokens"]) is not int or not 1 <= body["max_tokens"] <= 64000:
        return "max_tokens: out of range"
    messages = body["messages"]
    if not isinstance(messages, list) or not messages or any(set(m) != {"role", "content"} for m in messages):
        return "messages: a list of {role, content}"
    if any(m["role"] not in ("user", "assistant") or not isinstance(m["content"], str) or not m["content"].strip() for m in messages):
        return "messages: roles are user and assistant, content is text and not blank"
    if messages[0]["role"] != "user" or messages[-1]["role"] != "user":
        return "messages: the first and the last must be the user's; prefill is not supported"
    for block in body.get("system", []):
        if not isinstance(block, dict) or block.get("type") != "text" or not block.get("text", "").strip():
            return "system: text blocks"
        if block.get("cache_control", {"type": "ephemeral"}) != {"type": "ephemeral"}:
            return "system: cache_control"
    config = body.get("output_config", {})
    if set(config) - {"effort", "format"} or config.get("effort", "low") not in ("low", "medium", "high", "xhigh", "max"):
        return "output_config: only effort and format"
    if "format" in config and (set(config["format"]) != {"type", "schema"} or config["format"]["type"] != "json_schema"):
        return "output_config.format: type json_schema and schema"
    return bad_schema(config["format"]["schema"]) if "format" in config else None


def bad_schema(schema: dict) -> str | None:
    """Structured output takes closed objects with all keys required, and no ranges."""
    if unknown := set(schema) - {"type", "properties", "required", "additionalProperties", "enum", "description", "items"}:
        return f"schema: {unknown} is not supported"
    if schema.get("type") == "object":
        if schema.get("additionalProperties") is not False or set(schema["required"]) != set(schema["properties"]):
            return "schema: additionalProperties must be false and every property required"
        return next((said for part in schema["properties"].values() if (said := bad_schema(part))), None)
    if schema.get("type") == "array" and "items" in schema:
        return bad_schema(schema["items"])
    return None if schema.get("type") in ("string", "integer") else "schema: object, array of items, string or integer"


class Server(ThreadingHTTPServer):
    """answer(body) -> text of a good answer; fault(body, attempt) -> a name in FAULTS or SPECIAL, a status, or None, where attempt
    counts the requests with this body from 0. requests: every body that came in; answered: {body as JSON: good answers sent}."""
    request_queue_size = 256
    daemon_threads = True

    def __init__(self, answer=judge_answer, fault=lambda body, attempt: None, delay=0.0, stall=30.0, port=0, models=MODELS):
        super().__init__(("127.0.0.1", port), Handler)
        self.answer, self.fault, self.delay, self.stall, self.models = answer, fault, delay, stall, models
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.requests, self.refused, self.answered, self.attempts, self.looked_up = [], [], Counter(), Counter(), []
        self.now = self.peak = 0

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that went away is what the tests are about."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def send(self, status: int, body: str, headers=None, kind="application/json", cut: int = 0):
        data = body.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), "request-id": "req_test", **(headers or {})}.items():
            self.send_header(name, value)
        self._headers_buffer.append(b"\r\n" + data[:len(data) - cut])  # head and body in one packet
        self.flush_headers()
        self.close_connection = cut > 0

    def error(self, status: int, text: str, headers=None, code=None):
        error = {"type": ERRORS.get(status, "api_error"), "message": text} | ({"details": {"error_code": code}} if code else {})
        self.send(status, json.dumps({"type": "error", "error": error, "request_id": "req_test"}), headers)

    def authorised(self) -> bool:
        if self.headers.get("anthropic-version") != VERSION:
            self.error(400, f"anthropic-version: {VERSION} is required")
        elif (sent := self.headers.get("Authorization")) != f"Bearer {KEY}":
            self.error(401, f"invalid bearer token {sent}")  # an unkind server: it repeats the key
        else:
            return True
        return False

    def do_GET(self):
        model = self.path.rpartition("/")[2]
        self.server.looked_up.append(model)
        if not self.path.startswith("/v1/models/"):
            self.send(404, '{"detail": "Not Found"}')
        elif not self.authorised():
            return
        elif self.server.models is None:  # a compatible server without a list of models
            self.send(404, '{"detail": "Not Found"}')
        elif model not in self.server.models:
            self.error(404, f"model: {model}")
        else:
            state = self.server.models[model]
            self.send(200, json.dumps({"id": model, "type": "model", "display_name": model, "created_at": "2026-01-01T00:00:00Z",
                                       "lifecycle": state, "retires_at": RETIRES.get(state), "deprecated_at": None}))

    def do_POST(self):
        server = self.server
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if server.closing.is_set():  # a thread of a connection that outlived the server
            self.close_connection = True
            return
        if self.path != "/v1/messages":
            return self.send(404, '{"detail": "Not Found"}')
        if not self.authorised():
            return
        body = json.loads(raw)
        text = json.dumps(body, sort_keys=True)
        with server.lock:
            server.requests.append(body)
            server.now += 1
            server.peak = max(server.peak, server.now)
            attempt = server.attempts[text]
            server.attempts[text] += 1
        try:
            self.reply(body, text, attempt)
        finally:
            with server.lock:
                server.now -= 1

    def reply(self, body: dict, text: str, attempt: int):
        server = self.server
        if said := complaint(body):
            server.refused.append(said)
            return self.error(400, said)
        if server.models is not None and server.models.get(body["model"], "retired") == "retired":
            return self.error(404, f"model: {body['model']}")
        fault = server.fault(body, attempt)
        server.closing.wait(server.delay)
        if fault == "stall":
            server.closing.wait(server.stall)
            self.close_connection = True
        elif fault in SPECIAL:
            status, headers, code = SPECIAL[fault]
            self.error(status, fault, headers, code)
        elif fault is not None and str(fault).isdigit():
            self.error(int(fault), "by script")
        elif fault == "html":
            self.send(200, "<html><body>502 Bad Gateway</body></html>", kind="text/html")
        else:
            message = self.message(body, fault)
            if fault in ("drop", "truncated"):
                self.send(200, message if fault == "drop" else message[:-40], cut=40 if fault == "drop" else 0)
            else:
                if fault in (None, "thinking"):
                    with server.lock:
                        server.answered[text] += 1
                self.send(200, message)

    def message(self, body: dict, fault: str | None) -> str:
        if fault == "wrong shape":
            return '{"type": "message", "content": "text", "usage": null}'
        answer = self.server.answer(body)
        if fault == "no json":
            answer = "I cannot evaluate this."
        if fault in ("six", "missing"):
            scores = {**dict.fromkeys(DIMENSIONS, 5), "why": ""} | ({"relevance": 6} if fault == "six" else {})
            answer = json.dumps({k: v for k, v in scores.items() if fault == "six" or k != "specificity"})
        if fault == "max_tokens":
            answer = answer[:len(answer) // 2]
        stop = fault if fault in ("refusal", "max_tokens", "pause_turn", "new_value") else "end_turn"
        content = [] if fault in ("empty", "refusal") else [{"type": "text", "text": answer}]
        if fault == "thinking":
            half = len(answer) // 2
            content = [{"type": "thinking", "thinking": "5 everywhere?", "signature": "s"}, {"type": "text", "text": answer[:half]},
                       {"type": "text", "text": answer[half:]}]
        return json.dumps({"id": "msg_test", "type": "message", "role": "assistant", "model": body["model"] + "-served", "content": content,
                           "stop_reason": stop, "stop_sequence": None, "container": None,
                           "usage": {"input_tokens": 100, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 600,
                                     "output_tokens": 50}})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    with Server(delay=arguments.delay, port=arguments.port) as running:
        print(running.url, flush=True)
        while True:
            time.sleep(60)
