"""grpo.py: small integers, expected values written out, tiny random models made here."""

import ast
import builtins
import dis
import doctest
import gc
import importlib.util
import inspect
import math
import shutil
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import grpo
from grpo import (dpo_loss, group_advantages, head_logprobs, policy_loss, row_weights, sft_loss, shared_logprobs,
                  token_logprobs, trajectory_logprobs)

NAN = float("nan")
V = 50


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sample(model, prompts, G=1, seed=0, **how):
    return grpo.sample(model, prompts, G, seeds=range(seed, seed + len(prompts)), **how)


def tiny(kind="llama", dropout=0.0, vocab=V):
    """A random model, peaked enough (scaled head) that a wrong position or mask shows."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False,
                 bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.2)
    own = {"Gemma2": dict(sliding_window=8, final_logit_softcapping=3.0, query_pre_attn_scalar=16), "Cohere": dict(logit_scale=0.3),
           "Granite": dict(logits_scaling=4.0), "MiniMax": dict(layer_types=["full_attention"] * 2), "Falcon": dict(alibi=kind == "falcon"), "DiffLlama": dict(num_key_value_heads=2), "GPT2": dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout),
           "GPTNeo": dict(window_size=8, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])}
    if kind in ("falcon", "rotary falcon"):
        del sizes["head_dim"]
    name = {"gpt2": "GPT2", "gptneo": "GPTNeo", "qwen2": "Qwen2", "qwen3": "Qwen3", "minimax": "MiniMax", "rotary falcon": "Falcon"}.get(kind, kind[:1].upper() + kind[1:])
    config = getattr(transformers, name + "Config")(**{**sizes, **own.get(name, {})})
    return getattr(transformers, name + ("LMHeadModel" if kind == "gpt2" else "ForCausalLM"))(config).eval()


KINDS = ["llama", "qwen2", "gpt2"]
SHARING = [*KINDS, "qwen3", "gemma2"]  # Gemma 2 with a window of 8 tokens and capped logits


class TableModel:
    """Logits of the next token depend on the last token alone: row `token` of a table."""

    device = torch.device("cpu")

    def __init__(self, table):
        self.table = torch.as_tensor(table)
        self.calls = []

    def __call__(self, input_ids, logits_to_keep, **kwargs):
        self.calls.append(dict(kwargs, input_ids=input_ids, logits_to_keep=logits_to_keep))
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])


def close(got, want, atol=1e-5):
    torch.testing.assert_close(torch.as_tensor(got).double(), torch.as_tensor(want).double(), atol=atol, rtol=0)


def grads(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# ---- the file itself -------------------------------------------------------------------------------------------------

def test_docstring_examples_run():
    result = doctest.testmod(grpo)
    assert result.failed == 0 and result.attempted > 3


def test_file_works_alone_and_imports_torch_only(tmp_path):
    copy = shutil.copy(grpo.__file__, tmp_path / "copied_grpo.py")
    imported = set()
    text = Path(copy).read_text(encoding="utf-8").replace("    from transformers import AttentionInterface\n", "", 1)  # in `hold_once`, whose model is of transformers
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or ".").split(".")[0])
    assert "torch" in imported and imported - {"torch"} <= set(sys.stdlib_module_names)
    spec = importlib.util.spec_from_file_location("copied_grpo", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    close(module.group_advantages(torch.tensor([[0., 1.]])), [[-0.7070, 0.7070]], 1e-4)


@pytest.mark.parametrize("name, needs", [
    ("sample", {"prefill", "counts_columns", "hold_once"}), ("hold_once", {"attend"}), ("attend", set()), ("prefill", {"counts_columns", "keep", "recall"}), ("keep", {"join"}), ("recall", {"join"}), ("join", set()), ("counts_columns", set()), ("token_logprobs", set()), ("head_logprobs", set()), ("group_advantages", set()),
    ("shared_logprobs", {"prefill", "counts_columns", "head_logprobs", "token_logprobs"}), ("checkpoint_layers", set()), ("row_weights", set()), ("policy_loss", set()), ("sft_loss", set()),
    ("trajectory_logprobs", set()), ("dpo_loss", set())])
def test_each_function_can_be_copied_out_of_the_file(name, needs):
    """Its source, executed beside torch and what the docstring says it needs, finds every global that it uses."""
    space = {"torch": torch}
    exec(inspect.getsource(getattr(grpo, name)), space)
    codes, used = [inspect.unwrap(space[name]).__code__], set()
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if inspect.iscode(const)]
        used |= {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    assert used - {"torch", *dir(builtins)} == needs


# ---- group_advantages ------------------------------------------------------------------------------------------------

def test_advantages_divide_by_the_unbiased_std():
    """G05. Mean .25, unbiased variance (.5625 + 3*.0625)/3 = .25, std .5, eps 1e-4."""
    close(group_advantages(torch.tensor([[1., 0., 0., 0.]])), [[1.4997, -0.4999, -0.4999, -0.4999]], 1e-4)
    close(group_advantages(torch.tensor([[0., 1.]])), [[-0.707107, 0.707107]], 2e-4)
    close(group_advantages(torch.tensor([[1., 1., 2.]])), [[-0.577350, -0.577350, 1.154701]], 3e-4)


def test_equal_rewards_give_exactly_zero():
    """G01, G02: also for rewards that float32 cannot hold exactly."""
    for size in range(1, 17):
        for tenth in range(1, 20):
            assert torch.equal(group_advantages(torch.full((1, size), tenth / 10)), torch.zeros(1, size))
    almost = group_advantages(torch.tensor([[1.0, 1.0 + 5e-7]], dtype=torch.float64))
    assert torch.equal(almost, torch.zeros(1, 2)) and almost.dtype == torch.float32
    assert group_advantages(torch.tensor([[1.0, 1.0 + 5e-6]], dtype=torch.float64)).abs().min() > 0


def test_flat_group_trains_nothing():
    """G01: loss 0 and every gradient exactly 0."""
    logp = torch.tensor([[-1., -2.]] * 4, requires_grad=True)
    adv = group_advantages(torch.tensor([[1., 1., 1., 1.]])).flatten()
    loss, _ = policy_loss(logp, logp - 0.3, adv, torch.ones(4, 2).bool(), torch.full((4,), 1 / 8), (0.2, 0.2))
    loss.backward()
    assert loss.item() == 0 and logp.grad.abs().max() == 0


def test_group_of_one_is_flat():
    """G04."""
    assert torch.equal(group_advantages(torch.tensor([[3.0]])), torch.zeros(1, 1))


def test_mean_and_std_are_per_group_not_per_batch():
    """G06, G07, G09: rows are groups; a prompt that is drawn twice has two rows."""
    assert torch.equal(group_advantages(torch.tensor([[1., 1.], [0., 0.]])), torch.zeros(2, 2))


def test_unknown_reward_is_left_out_of_its_group():
    """G10, G11. Mean of {1,0,1} .6667, unbiased std .57735."""
    close(group_advantages(torch.tensor([[1., NAN, 0., 1.]])), [[0.5773, 0, -1.1545, 0.5773]], 1e-4)
    close(group_advantages(torch.tensor([[0.9, 0.8, 0.85, NAN]])), [[0.9980, -0.9980, 0, 0]], 1e-4)


def test_fewer_than_two_known_rewards_are_flat():
    got = group_advantages(torch.tensor([[NAN, NAN], [1., NAN], [0., 1.]]))
    assert torch.equal(got[:2], torch.zeros(2, 2)) and got[2].abs().min() > 0.7


def test_share_of_flat_groups_with_a_binary_reward():
    """G42: p^G + (1-p)^G."""
    torch.manual_seed(0)
    for size, share in [(2, 0.7024), (4, 0.4490), (8, 0.2007), (16, 0.0403)]:
        rewards = (torch.rand(20_000, size) < 0.1819).float()
        assert abs((group_advantages(rewards) == 0).all(1).float().mean().item() - share) < 0.01


def test_mean_includes_the_sample_itself():
    """G43: r - mean(all) = (G-1)/G * (r - mean(others)); known and kept."""
    rewards = torch.tensor([[0., 1., 3., 8.]])
    others = torch.tensor([[4., 11 / 3, 3., 4 / 3]])
    std = rewards.double().std(1, keepdim=True)
    close(group_advantages(rewards), 0.75 * (rewards - others) / (std + 1e-4), 1e-6)


# ---- row_weights and policy_loss -------------------------------------------------------------------------------------

@pytest.mark.parametrize("norm, want", [("sequence", 0.0), ("token", 0.5), ("constant", 0.25)])
def test_normalisations_by_hand(norm, want):
    """G20: lengths 2 (A=+1) and 6 (A=-1), ratio 1, limit 8. (-2+6)/8 = .5, /(2*8) = .25; never /12, the padded grid."""
    lengths = torch.tensor([2, 6])
    mask = torch.arange(6) < lengths[:, None]
    weight = row_weights(lengths, torch.tensor([True, True]), norm, 8)
    loss, _ = policy_loss(torch.zeros(2, 6), torch.zeros(2, 6), torch.tensor([1., -1.]), mask, weight, (0.2, 0.2))
    close(loss, want, 1e-7)


def test_token_mean_over_two_micro_batches():
    """G21, G22: (4*1 + 3)/5 = 1.4, not the mean of the means (2.0), and nothing is divided again."""
    weight = row_weights(torch.tensor([4, 1]), torch.tensor([True, True]), "token", 4)
    one, _ = policy_loss(torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([-1.]), torch.ones(1, 4).bool(), weight[:1],
                         (0.2, 0.2))
    two, _ = policy_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([-3.]), torch.ones(1, 1).bool(), weight[1:],
                         (0.2, 0.2))
    close(one + two, 1.4, 1e-6)


def test_unknown_rows_leave_the_denominators_and_flat_rows_stay():
    """G10. Rows: length 2, length 6 unknown, length 3 (flat or not: the weights do not know)."""
    lengths, known = torch.tensor([2, 6, 3]), torch.tensor([True, False, True])
    close(row_weights(lengths, known, "sequence", 8), [1 / 4, 0, 1 / 6], 1e-7)
    close(row_weights(lengths, known, "token", 8), [1 / 5, 0, 1 / 5], 1e-7)
    close(row_weights(lengths, known, "constant", 8), [1 / 16, 0, 1 / 16], 1e-7)


@pytest.mark.parametrize("norm", ["sequence", "token", "constant"])
def test_nothing_to_train_is_zero_not_nan(norm):
    """G25: all unknown, or all empty: loss 0, finite zero gradients."""
    for lengths, known in [([3, 3], [False, False]), ([0, 0], [True, True])]:
        lengths = torch.tensor(lengths)
        weight = row_weights(lengths, torch.tensor(known), norm, 8)
        assert torch.equal(weight, torch.zeros(2)) and weight.dtype == torch.float32
        logp = torch.zeros(2, 4, requires_grad=True)
        loss, metrics = policy_loss(logp, logp, torch.zeros(2), torch.arange(4) < lengths[:, None], weight, (0.2, 0.2))
        loss.backward()
        assert loss.item() == 0 and torch.equal(logp.grad, torch.zeros(2, 4))
        assert all(value.isfinite() for value in metrics.values())


def test_unknown_norm_names_the_three():
    with pytest.raises(ValueError, match="sequence, token or constant"):
        row_weights(torch.tensor([1]), torch.tensor([True]), "mean", 8)


def test_loss_and_gradient_of_two_tokens_by_hand():
    """r = [1.1, 0.9], A = 2, weight 1/2: loss -(1.1*2 + 0.9*2)/2 = -2, gradient to logp -w*A*r = [-1.1, -0.9]."""
    logp = torch.tensor([[-1., -2.]], requires_grad=True)
    old = logp.detach() - torch.tensor([[1.1, 0.9]]).log()
    loss, metrics = policy_loss(logp, old, torch.tensor([2.]), torch.ones(1, 2).bool(), torch.tensor([0.5]), (0.2, 0.2))
    loss.backward()
    close(loss, -2.0, 1e-6)
    close(logp.grad, [[-1.1, -0.9]], 1e-6)
    # k3: ((1.1 - 1 - ln 1.1) + (0.9 - 1 - ln 0.9)) / 2
    close(metrics["kl_old_new"], (0.1 - math.log(1.1) - 0.1 - math.log(0.9)) / 2, 1e-6)
    close(metrics["entropy"], -old.mean(), 1e-6)
    assert not any(value.requires_grad for value in metrics.values())
    assert metrics["weight"] == 1.0 and metrics["tokens"] == 2 and metrics["clip_fraction"] == 0


@pytest.mark.parametrize("same", [True, False])
def test_first_update_has_loss_zero_and_a_gradient(same):
    """G13, G14: d/dlogp of -ratio*A/4 at ratio 1 is -A/4, also when the old log-probs carry a graph."""
    logp = torch.tensor([[-1., -2.], [-0.5, -3.]], requires_grad=True)
    weight = row_weights(torch.tensor([2, 2]), torch.tensor([True, True]), "token", 2)
    loss, metrics = policy_loss(logp, logp if same else logp.detach(), torch.tensor([1., -1.]), torch.ones(2, 2).bool(),
                                weight, (0.2, 0.2))
    loss.backward()
    assert abs(loss.item()) < 1e-7 and metrics["clip_fraction"] == 0 and metrics["kl_old_new"] == 0
    close(logp.grad, [[-0.25, -0.25], [0.25, 0.25]], 1e-7)


@pytest.mark.parametrize("r, A, want, slope, clipped", [
    (1.5, 1, -1.2, 0, 1), (1.5, -1, 1.5, 1, 0), (0.5, 1, -0.5, -1, 0), (0.5, -1, 0.8, 0, 1), (1.0, 1, -1.0, -1, 0)])
def test_clip_for_both_signs(r, A, want, slope, clipped):
    """G15: a large ratio with A<0 is not clipped. d loss/d logp = r * d loss/d r."""
    logp = torch.tensor([[math.log(r)]], requires_grad=True)
    loss, metrics = policy_loss(logp, torch.zeros(1, 1), torch.tensor([float(A)]), torch.ones(1, 1).bool(),
                                torch.ones(1), (0.2, 0.2))
    loss.backward()
    close(loss, want, 1e-6)
    close(logp.grad, [[r * slope]], 1e-6)
    assert metrics["clip_fraction"] == clipped


def test_the_two_clip_bounds_are_separate():
    """low 0.1, high 0.3: r 1.5 with A=1 -> -1.3; r 0.5 with A=-1 -> 0.9."""
    for r, A, want in [(1.5, 1., -1.3), (0.5, -1., 0.9)]:
        loss, _ = policy_loss(torch.tensor([[math.log(r)]]), torch.zeros(1, 1), torch.tensor([A]),
                              torch.ones(1, 1).bool(), torch.ones(1), (0.1, 0.3))
        close(loss, want, 1e-6)


def test_overflow_on_a_masked_token_stays_out():
    """G18: log-ratio [1000, 0], mask [0, 1], A=1 -> loss -1, gradient [0, -1]."""
    logp = torch.tensor([[1000., 0.]], requires_grad=True)
    loss, metrics = policy_loss(logp, torch.zeros(1, 2), torch.tensor([1.]), torch.tensor([[False, True]]),
                                torch.ones(1), (0.2, 0.2))
    loss.backward()
    assert loss.item() == -1 and torch.equal(logp.grad, torch.tensor([[0., -1.]]))
    assert metrics["tokens"] == 1 and metrics["kl_old_new"] == 0


@pytest.mark.parametrize("masked_value", [NAN, math.inf, -math.inf])
def test_garbage_in_masked_positions_stays_out(masked_value):
    logp = torch.tensor([[masked_value, -1.]], requires_grad=True)
    loss, metrics = policy_loss(logp, torch.tensor([[masked_value, -1.]]), torch.tensor([1.]),
                                torch.tensor([[False, True]]), torch.ones(1), (0.2, 0.2))
    loss.backward()
    assert loss.item() == -1 and torch.equal(logp.grad, torch.tensor([[0., -1.]]))
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("A", [1., 0., -1.])
@pytest.mark.parametrize("log_ratio", [1000., 88.8, 30., -30., -1000., -math.inf])
def test_loss_and_gradient_are_finite_whatever_the_ratio(A, log_ratio):
    """G19."""
    logp = torch.tensor([[log_ratio]], requires_grad=True)
    loss, metrics = policy_loss(logp, torch.zeros(1, 1), torch.tensor([A]), torch.ones(1, 1).bool(), torch.ones(1),
                                (0.2, 0.2))
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all() and all(value.isfinite() for value in metrics.values())
    if A == 1 and log_ratio > 0:
        close(loss, -1.2, 1e-6)
        assert logp.grad.item() == 0
    if A == 0:
        assert loss.item() == 0 and logp.grad.item() == 0
    if A == -1 and log_ratio > 0:  # not clipped: the damage shows in the loss
        assert loss.item() > 1e8


def test_metrics_of_micro_batches_add_up():
    torch.manual_seed(0)
    logp, old, adv = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([1., -1., 2., -2.])
    lengths = torch.tensor([3, 1, 2, 3])
    mask = torch.arange(3) < lengths[:, None]
    weight = row_weights(lengths, torch.ones(4).bool(), "token", 3)
    whole = policy_loss(logp, old, adv, mask, weight, (0.2, 0.2))
    parts = [policy_loss(logp[i:i + 2], old[i:i + 2], adv[i:i + 2], mask[i:i + 2], weight[i:i + 2], (0.2, 0.2))
             for i in (0, 2)]
    close(sum(loss for loss, _ in parts), whole[0])
    for name, value in whole[1].items():
        close(sum(metrics[name] for _, metrics in parts), value)
    assert whole[1]["kl_old_new"] > 0 and 0 < whole[1]["clip_fraction"] < 1


@pytest.mark.parametrize("norm", ["sequence", "token", "constant"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_gradients_do_not_depend_on_the_micro_batches(norm, dtype, tolerance):
    """G21, G22: 1x8, 2x4 and 8x1 rows, lengths from 1 to 9, an unknown row and a flat group among them."""
    model = tiny().to(dtype)
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(0, V, (n,), generator=generator).tolist()  # noqa: E731
    prompts = [draw(n) for n in (3, 6)]
    completions = [draw(n) for n in (1, 9, 4, 2, 5, 5, 3, 7)]
    rewards_PG = torch.tensor([[1., 0., NAN, 0.5], [0., 2., 1., 1.]])
    adv = group_advantages(rewards_PG).flatten()
    weight = row_weights(torch.tensor([len(c) for c in completions]), ~rewards_PG.flatten().isnan(), norm, 9)
    results = []
    for size in (8, 4, 1):
        model.zero_grad()
        for i in range(0, 8, size):
            rows = slice(i, i + size)
            batch = [prompts[b // 4] for b in range(i, i + size)]
            logp, mask = token_logprobs(model, batch, completions[rows], 1.0)
            old = logp.detach() - 0.1 * torch.arange(i, i + size)[:, None].remainder(3)
            policy_loss(logp, old, adv[rows], mask, weight[rows], (0.2, 0.2))[0].backward()
        results.append(grads(model).double())
    for other in results[1:]:
        assert (other - results[0]).abs().max() <= tolerance * results[0].abs().max()
    assert results[0].abs().max() > 0


# ---- token_logprobs --------------------------------------------------------------------------------------------------

def test_token_t_is_scored_by_the_logits_before_it():
    """G30. ln .1, ln .2, ln .1; unshifted it would be ln .6, ln .5, ln .25."""
    probs = torch.tensor([[.7, .1, .1, .1], [.1, .6, .2, .1], [.2, .2, .5, .1], [.25, .25, .25, .25]])
    logp, mask = token_logprobs(TableModel(probs.log()), [[0]], [[1, 2, 3]], 1.0)
    close(logp, [[-2.302585, -1.609438, -2.302585]], 1e-6)
    assert mask.tolist() == [[True, True, True]]


@pytest.mark.parametrize("temperature, want", [(0.6, -0.202573), (1.0, -0.407606), (0.7, -0.260118), (2.0, -0.680270)])
def test_temperature_divides_the_logits(temperature, want):
    """G33: logits [2,1,0], token 0; G34: over the whole vocabulary."""
    logp, _ = token_logprobs(TableModel([[2., 1., 0.]] * 3), [[0]], [[0]], temperature)
    close(logp, [[want]], 1e-6)


def test_temperature_zero_is_refused():
    with pytest.raises(AssertionError, match="temperature is 0"):
        token_logprobs(TableModel([[2., 1., 0.]] * 3), [[0]], [[0]], 0)


def test_log_softmax_is_computed_in_float32():
    """G38: bfloat16 logits [20,10,0]; 151936 equal logits."""
    model = TableModel(torch.tensor([[20., 10., 0.]] * 3, dtype=torch.bfloat16))
    logp, _ = token_logprobs(model, [[0]], [[0, 1, 2]], 1.0)
    assert logp.dtype == torch.float32
    close(logp, [[-4.54e-05, -10.0000454, -20.0000454]], 1e-5)
    logp, _ = token_logprobs(TableModel(torch.zeros(1, 151_936, dtype=torch.bfloat16)), [[0]], [[0]], 1.0)
    close(logp, [[-11.931215]], 1e-5)


def test_gather_minus_logsumexp_equals_log_softmax_with_gradient():
    """G39."""
    torch.manual_seed(0)
    table = torch.randn(V, V)
    one, two = table.clone().requires_grad_(), table.clone().requires_grad_()
    completions = torch.randint(0, V, (3, 7))
    model = TableModel(table)
    model.table = one
    got, _ = token_logprobs(model, [[4]], completions.tolist(), 0.6)
    before = torch.cat([torch.full((3, 1), 4), completions[:, :-1]], 1)
    want = (two[before] / 0.6).log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    slope = torch.randn(3, 7)
    (got * slope).sum().backward()
    (want * slope).sum().backward()
    close(got, want, 1e-5)
    close(one.grad, two.grad, 1e-5)
    assert (got <= 0).all()


def test_mask_comes_from_lengths_never_from_token_values():
    """G26, G28: pad == end == 3, inside, at the end and as the whole completion; the end token is trained."""
    completions = [[9, 8, 3], [9, 8, 7, 6, 5], [3], [9, 3]]
    table = torch.zeros(10, 10, requires_grad=True)
    logp, mask = token_logprobs(TableModel(table), [[3, 3]], completions, 1.0, pad_id=3)
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert torch.equal(logp != 0, mask)


def test_end_token_has_a_gradient():
    """G28: 'a b <end>' is three trained tokens."""
    model = TableModel([[0.] * 4] * 4)
    model.table.requires_grad_()
    logp, mask = token_logprobs(model, [[0]], [[1, 2, 3]], 1.0)
    logp[0, 2].backward()
    assert mask.sum() == 3 and model.table.grad[2].abs().sum() > 0


def test_model_is_asked_for_the_completion_positions_only():
    """G44: logits over prompt text do not exist, so nothing in a prompt can be trained."""
    model = TableModel(torch.zeros(9, 9))
    token_logprobs(model, [[5, 6, 7], [8]], [[1, 2], [3], [4], [1]], 1.0, pad_id=0)
    call = model.calls[0]
    assert call["input_ids"].tolist() == [[5, 6, 7, 1, 2], [5, 6, 7, 3, 0], [0, 0, 8, 4, 0], [0, 0, 8, 1, 0]]
    assert call["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]]
    assert call["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 3], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]
    assert call["logits_to_keep"] == 3 and call["use_cache"] is False


def test_rows_of_a_dialogue_add_up_to_its_agent_tokens():
    """G44: P P A A U U U A A as two rows scores exactly the four agent tokens."""
    model = tiny()
    tokens = [11, 12, 21, 22, 31, 32, 33, 23, 24]
    logp, mask = token_logprobs(model, [tokens[:2], tokens[:7]], [tokens[2:4], tokens[7:]], 1.0)
    with torch.no_grad():
        full = model(torch.tensor([tokens])).logits.log_softmax(-1)
    want = [[full[0, t - 1, tokens[t]].item() for t in pair] for pair in ((2, 3), (7, 8))]
    close(logp, want, 1e-5)
    assert mask.sum() == 4


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_batch_mates_change_nothing(kind):
    """G31: every row alone, and beside rows with 0..7 more tokens on either side; pad id 0 or 7; gradients finite."""
    model = tiny(kind)
    generator = torch.Generator().manual_seed(2)
    draw = lambda n: torch.randint(0, V, (n,), generator=generator).tolist()  # noqa: E731
    prompts = [draw(n) for n in (5, 12, 8, 6)]
    completions = [draw(n) for n in (4, 1, 11, 0)]
    for pad_id in (0, 7):
        logp, mask = token_logprobs(model, prompts, completions, 0.6, pad_id=pad_id)
        assert mask.sum(1).tolist() == [4, 1, 11, 0] and torch.equal(logp[~mask], torch.zeros((~mask).sum()))
        for b in range(3):
            alone, _ = token_logprobs(model, prompts[b:b + 1], completions[b:b + 1], 0.6)
            close(logp[b][mask[b]].detach(), alone[0].detach(), 1e-5)
    logp.sum().backward()
    assert grads(model).isfinite().all()


@pytest.mark.parametrize("function", [token_logprobs, shared_logprobs])
def test_empty_completions_alone(function):
    logp, mask = function(tiny(), [[1, 2]], [[], []], 1.0)
    assert logp.shape == mask.shape == (2, 0)


def test_lengths_are_printed_when_the_batch_does_not_fit():
    with pytest.raises(AssertionError, match="3 completions are no multiple of 2 prompts"):
        token_logprobs(tiny(), [[1], [2]], [[1], [2], [3]], 1.0)
    with pytest.raises(AssertionError, match=r"lengths are \[1, 0\]"):
        token_logprobs(tiny(), [[1], []], [[1], [2]], 1.0)
    with pytest.raises(AssertionError, match=r"lengths are \[1, 0\]"):
        sample(tiny(), [[1], []], max_new_tokens=2, temperature=1.0, eos_ids=[1], pad_id=0)


# ---- shared_logprobs, head_logprobs ----------------------------------------------------------------------------------

def draw(*lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, V, (n,), generator=generator).tolist() for n in lengths]


SYSTEM, OWN = list(range(20, 29)), [[1, 2, 3, 4, 5, 6], [7, 8], [9], [10, 11, 12, 13], [14, 15, 16, 17]]
# (prompts, what each call of the body sees: rows, tokens of a row), with two completions each, of 5 and 7, 1 and 0, 4 and 2 tokens:
# the longest row of the last call holds a prompt's last token and 4 and 6 of its completions, or 6 where each has a row of its own
LAYOUTS = {"padded": ([OWN[0] * 2, OWN[1] * 2, [9]], [(3, 11), (3, 11)], [(3, 11), (6, 7)]),
           "shared and padded": ([SYSTEM + own for own in OWN[:3]], [(1, 9), (3, 5), (3, 11)], [(3, 14), (6, 7)]),  # padding in the middle would shift windows
           "shared": ([SYSTEM + own for own in OWN[3:]], [(1, 9), (2, 3), (2, 11)], [(1, 9), (2, 3), (4, 7)]),
           "one prompt": ([SYSTEM], [(1, 8), (1, 11)], [(1, 8), (2, 7)]),
           "one token": ([[1]], [(2, 3)], [(2, 3)]),  # nothing to share: plain
           "a prompt twice": ([SYSTEM, SYSTEM], [(1, 8), (2, 11)], [(1, 8), (4, 7)])}
COMPLETIONS = [*draw(5, 7, 1), [], *draw(4, 2)]
COLUMNS = ["gemma2", "gptneo", "mpt", "bloom", "falcon"]  # windows and ALiBi: distances are counted in columns


@pytest.mark.parametrize("kind", [*SHARING, "cohere", "granite", *COLUMNS[1:]])
def test_shared_prompts_change_neither_log_probs_nor_gradients(kind, monkeypatch):
    """Log-probs to 1e-4, gradients to 1e-5 of the largest, for each normalisation; and which tokens are computed."""
    model, seen = tiny(kind), []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    monkeypatch.setattr(head_logprobs, "__defaults__", (4 * V * 3,))  # three tokens at a time
    for name, (prompts, packed, by_rows) in LAYOUTS.items():
        completions = COMPLETIONS[:2 * len(prompts)] if len(prompts[0]) > 1 else [[2, 3], [4]]
        lengths, B = torch.tensor([len(c) for c in completions]), len(completions)
        for norm in ("sequence", "token", "constant") if "shared" in name else ("sequence",):
            weight, got = row_weights(lengths, torch.ones(B), norm, 8), []
            for function in (token_logprobs, shared_logprobs):
                model.zero_grad()
                seen.clear()
                logp, mask = function(model, prompts, completions, 0.6, pad_id=7)
                old = logp.detach() - 0.1 * torch.arange(B)[:, None].remainder(3)
                policy_loss(logp, old, torch.linspace(-1, 2, B), mask, weight)[0].backward()
                got.append((logp.detach(), mask, grads(model)))
            (logp, mask, grad), (logp_shared, mask_shared, grad_shared) = got
            assert torch.equal(mask, mask_shared) and logp_shared.dtype == torch.float32
            close(logp_shared, logp, 1e-4)
            assert (grad_shared - grad).abs().max() <= 1e-5 * grad.abs().max() and grad.abs().max() > 0, (name, norm)
        assert seen == (by_rows if kind in COLUMNS else packed), name


def test_every_token_is_computed_once():
    """S shared tokens, P prompts of p more, G completions of c: S + P*p + P*G*c tokens, less the last one of each completion, which
    predicts nothing. In the rollout the last token of a prompt goes with each of its completions."""
    S, P, p, G, c = 9, 2, 4, 3, 5
    model, seen = tiny(), []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))
    prompts, completions = [SYSTEM + own for own in OWN[3:]], draw(*[c] * P * G)
    shared_logprobs(model, prompts, completions, 1.0)
    assert sum(seen) == S + P * p + P * G * (c - 1)
    seen.clear()
    token_logprobs(model, prompts, completions, 1.0)
    assert sum(seen) == P * G * (S + p + c)
    seen.clear()
    sample(model, prompts, G, max_new_tokens=c, temperature=1.0, eos_ids=[], pad_id=0)
    assert sum(seen) == S + P * (p - 1) + P * G * c


def test_states_that_cannot_be_repeated_take_the_plain_path():
    """A recurrent model, said once a place; the same log-probs, the same greedy tokens as each prompt alone."""
    transformers.logging.set_verbosity_error()  # it says that its fast kernels are not installed
    model = transformers.MambaForCausalLM(transformers.MambaConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, state_size=4, bos_token_id=None, eos_token_id=None, pad_token_id=None)).eval()
    prompts, completions = [SYSTEM, SYSTEM + [1]], draw(2, 3, 1, 2)
    with pytest.warns(UserWarning, match=r"MambaForCausalLM keeps what cannot be repeated \(LinearAttentionLayer\)"):
        logp, mask = shared_logprobs(model, prompts, completions, 0.6)
    want, mask_want = token_logprobs(model, prompts, completions, 0.6)
    assert torch.equal(logp, want) and torch.equal(mask, mask_want)
    how, seen = dict(max_new_tokens=3, temperature=0, eos_ids=[], pad_id=0, stretch=1), []
    with pytest.warns(UserWarning, match="cannot be repeated"):
        one = sample(model, prompts[:1], 1, **how)
        model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
        assert sample(model, prompts[:1], 2, **how) == one * 2
    assert seen == [8, 9, 1, 1]  # tried; then the prompt once, not once a stretch
    minimax = tiny("minimax")  # it keeps recurrent states beside ordinary layers
    with pytest.warns(UserWarning, match=r"cannot be repeated \(MiniMaxCache\)"):
        assert torch.equal(shared_logprobs(minimax, prompts, completions, 0.6)[0], token_logprobs(minimax, prompts, completions, 0.6)[0])
    model.get_decoder = lambda: Uncached(model.backbone)
    with pytest.warns(UserWarning, match=r"cannot be repeated \(NoneType\)"):
        assert torch.equal(shared_logprobs(model, prompts, completions, 0.6)[0], want)


class Uncached:
    config = None

    def __init__(self, body):
        self.body = body

    def forward(self, input_ids, **kwargs):
        return SimpleNamespace(last_hidden_state=self.body(input_ids).last_hidden_state)

    __call__ = forward


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("tokens", [1, 3, 21])
def test_chunks_change_nothing(kind, tokens):
    """G39. Logits of 20 tokens, 1 or 3 at a time, each made twice (once more in the backward pass) and none kept; or all at once."""
    model, seen = tiny(kind), []
    hidden, ids = torch.randn(20, 32, generator=torch.Generator().manual_seed(0)), torch.tensor(draw(20)[0])
    cap = (lambda x: 3.0 * torch.tanh(x / 3.0)) if kind == "gemma2" else (lambda x: x)
    got = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.numel() // V))
    for way in ("plain", "chunks"):
        model.zero_grad()
        seen.clear()
        h = hidden.clone().requires_grad_()
        if way == "plain":
            logp = (cap(model.lm_head(h)) / 0.6).log_softmax(-1)[range(20), ids]
        else:
            logp = head_logprobs(model, transformers.modeling_outputs.BaseModelOutputWithPast, h, ids, 0.6, chunk_bytes=4 * V * tokens + 1)
        (logp * torch.linspace(-1, 1, 20)).sum().backward()
        got.append((logp.detach(), h.grad, model.lm_head.weight.grad.clone()))
    for one, two in zip(*got):
        close(one, two, 1e-5)
    assert max(seen) == min(tokens, 20) and sum(seen) == (40 if tokens < 20 else 20)


def test_no_sum_depends_on_the_order_of_threads(monkeypatch):
    """A run repeats to the last bit: no pass adds up by index_put, which on a CPU lets threads add as they come (it took one run in three)."""
    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    names, prompts = [], [SYSTEM + own for own in OWN[3:]]
    with Calls():
        logp, mask = shared_logprobs(tiny(), prompts, draw(5, 4, 3, 2), 1.0)
        logp.sum().backward()
    assert "aten::index_select" in names and not any("index_put" in name for name in names)


@pytest.mark.parametrize("own", [False, True])
def test_the_body_is_itself_again_after_the_head(own):
    """Also when the head raises, and where somebody (a hook of accelerate) has put a forward of its own on the body."""
    model = tiny()
    if own:
        forward = model.model.forward = model.model.forward
    output_type = transformers.modeling_outputs.BaseModelOutputWithPast
    head_logprobs(model, output_type, torch.zeros(2, 32), torch.tensor([1, 2]), 1.0)
    with pytest.raises(RuntimeError):
        head_logprobs(model, output_type, torch.zeros(2, 31), torch.tensor([1, 2]), 1.0)
    assert vars(model.model).get("forward") == (forward if own else None)


def peak_bytes(function, model, *args):
    """The most memory that is allocated at once during an update, above weights and their gradients, which are there before."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        logp, mask = function(model, *args, 1.0)
        sft_loss(logp, mask, torch.ones(len(mask)))[0].backward()
    now = peak = 0
    for event in sorted((e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_memory_hardly_depends_on_the_vocabulary(monkeypatch):
    """Twice the vocabulary, the same width and bytes a chunk: less than 10 % more. On the plain path it is most of the memory."""
    monkeypatch.setattr(head_logprobs, "__defaults__", (2**18,))
    rows = [SYSTEM + own for own in OWN[3:]], draw(*[40] * 16)
    plain, shared = ([peak_bytes(function, tiny(vocab=vocab), *rows) for vocab in (2000, 4000)] for function in (token_logprobs, shared_logprobs))
    assert shared[1] < 1.1 * shared[0] and plain[1] > 1.5 * plain[0], (plain, shared)


@pytest.mark.parametrize("kind", [*SHARING, "cohere", "granite", *COLUMNS[1:]])
def test_layers_computed_again_change_nothing(kind):
    """Shared and plain path, to the last bit; each layer runs once more in the backward pass, and not at all more when sampling."""
    prompts, completions, got = LAYOUTS["shared and padded"][0], COMPLETIONS[:6], []
    how = dict(max_new_tokens=4, temperature=0.6, eos_ids=[], pad_id=7)
    for again in (False, True):
        model, runs = tiny(kind), []
        layers = next(m for m in model.get_decoder().children() if isinstance(m, torch.nn.ModuleList))
        attention = next(m for m in layers[-1].modules() if isinstance(m, (torch.nn.Linear, transformers.pytorch_utils.Conv1D)))
        attention.register_forward_hook(lambda *_: runs.append(1))
        if again:
            grpo.checkpoint_layers(model)
        for function, passes in ((token_logprobs, 1), (shared_logprobs, 2 if kind in COLUMNS else 3)):
            model.zero_grad()
            runs.clear()
            logp, mask = function(model, prompts, completions, 0.6, pad_id=7)
            sft_loss(logp, mask, torch.arange(6.) + 1)[0].backward()
            assert len(runs) == passes * (1 + again)
            got.append((logp.detach(), grads(model)))
        runs.clear()
        got.append((torch.tensor(sample(model, prompts, 2, **how)), torch.tensor(len(runs))))
    for plain, recomputed in zip(got[:3], got[3:]):
        assert all(torch.equal(a, b) for a, b in zip(plain, recomputed))


def test_layers_computed_again_need_less_memory():
    rows = [SYSTEM * 4 + own for own in OWN[3:]], draw(*[40] * 16)
    one, other = tiny(), tiny()
    grpo.checkpoint_layers(other)
    assert peak_bytes(shared_logprobs, other, *rows) < 0.75 * peak_bytes(shared_logprobs, one, *rows)


def test_ratio_is_exactly_one_without_dropout():
    """G37. With dropout on, two passes over the same weights differ: the trainer must switch it off."""
    model = tiny("gpt2", dropout=0.1)
    one, two = [token_logprobs(model, [[1, 2, 3]], [[4, 5, 6, 7]], 1.0)[0].detach() for _ in range(2)]
    assert torch.equal((one - two).exp(), torch.ones(1, 4))
    model.train()
    one, two = [token_logprobs(model, [[1, 2, 3]], [[4, 5, 6, 7]], 1.0)[0].detach() for _ in range(2)]
    assert not torch.equal(one, two)


# ---- sft_loss --------------------------------------------------------------------------------------------------------

def token_mean(mask):
    return row_weights(mask.sum(1), mask.any(1), "token", 8)


def test_sft_is_shifted_once_and_leaves_the_prompt_out():
    """S01, S02. Rows 1 and 2 predict tokens 2 and 3: -(ln .2 + ln .1) / 2. With the prompt it would be 2.071536, unshifted 1.039721."""
    probs = torch.tensor([[.7, .1, .1, .1], [.1, .6, .2, .1], [.2, .2, .5, .1], [.25, .25, .25, .25]])
    logp, mask = token_logprobs(TableModel(probs.log()), [[0, 1]], [[2, 3]], 1.0)
    loss, metrics = sft_loss(logp, mask, token_mean(mask))
    close(loss, 1.956012, 1e-6)
    assert metrics["tokens"] == 2 and metrics["empty"] == 0
    close(metrics["weight"], 1.0)


def test_sft_of_nothing_is_zero_and_counted():
    """S03. Never NaN, whatever stands in the masked places; beside another row, the mean is that row's."""
    logp = torch.tensor([[-torch.inf, NAN], [-1., -torch.inf]], requires_grad=True)
    mask = torch.tensor([[False, False], [True, False]])
    loss, metrics = sft_loss(logp[:1], mask[:1], token_mean(mask[:1]))
    loss.backward()
    assert loss == 0 and logp.grad.tolist() == [[0, 0], [0, 0]] and metrics["empty"] == 1 and metrics["tokens"] == 0
    loss, metrics = sft_loss(logp, mask, token_mean(mask))
    loss.backward()
    assert loss == 1 and logp.grad.tolist() == [[0, 0], [-1, 0]] and metrics["empty"] == 1


def test_sft_equals_cross_entropy_and_micro_batches_add_up():
    """The loss that Hugging Face models (and TRL's SFT trainer) compute from labels, with labels -100 on the prompt; and its gradient."""
    model, rows = tiny(), [([1, 2, 3], [4, 5]), ([6], [7, 8, 9, 10]), ([11, 12], [13])]
    ids = torch.tensor([p + c + [0] * (5 - len(p + c)) for p, c in rows])
    labels = torch.tensor([[-100] * len(p) + c + [-100] * (5 - len(p + c)) for p, c in rows])
    want = model(input_ids=ids, labels=labels).loss
    want.backward()
    want_grad = grads(model)
    model.zero_grad()
    weight, total = row_weights(torch.tensor([2, 4, 1]), torch.ones(3), "token", 8), 0.0
    for some in ([0, 2], [1]):
        logp, mask = token_logprobs(model, [rows[b][0] for b in some], [rows[b][1] for b in some], 1.0)
        loss, _ = sft_loss(logp, mask, weight[some])
        loss.backward()
        total += loss.item()
    close(total, want.item())
    close(grads(model), want_grad)


# ---- trajectory_logprobs, dpo_loss -----------------------------------------------------------------------------------

ONE = torch.ones(1)


def dpo_of(margin, beta=0.1):
    return dpo_loss(torch.tensor([margin - 5.]), torch.tensor([-7.]), torch.tensor([-5.]), torch.tensor([-7.]), ONE, beta)


@pytest.mark.parametrize("beta, margin, want", [(0.1, 1., 0.644397), (0.1, -1., 0.744397), (0.1, 20., 0.126928), (0.5, 2., 0.313262),
                                                (1., -200., 200.)])
def test_dpo_beta_and_sign(beta, margin, want):
    """S07: ln(1 + exp(-beta * margin)), also where the sigmoid underflows."""
    loss, metrics = dpo_of(margin, beta)
    close(loss, want, 1e-4 if want == 200 else 1e-6)
    close(metrics["margin"], margin, 1e-4)
    close(metrics["reward_chosen"] - metrics["reward_rejected"], beta * margin, 1e-4)
    assert metrics["accuracy"] == (margin > 0)


def test_dpo_of_equal_policies_is_ln_2_with_a_gradient():
    """S06. Margin, rewards and accuracy 0; -+ beta / 2 for chosen and rejected; the same trajectory on both sides trains nothing."""
    chosen, rejected = torch.tensor([-3.], requires_grad=True), torch.tensor([-4.], requires_grad=True)
    loss, metrics = dpo_loss(chosen, rejected, chosen, rejected, ONE)  # the reference is detached inside
    loss.backward()
    close(loss, math.log(2), 1e-6)
    assert [metrics[name].item() for name in ("margin", "accuracy", "reward_chosen", "reward_rejected")] == [0, 0, 0, 0]
    close(torch.stack([chosen.grad, rejected.grad]), [[-0.05], [0.05]])
    chosen.grad = None
    dpo_loss(chosen, chosen, torch.tensor([-2.]), torch.tensor([-9.]), ONE)[0].backward()
    assert chosen.grad.item() == 0


def test_dpo_adds_log_probs_up_whatever_the_padding():
    """S08. 2 * (-1.0 + 1.2) - 8 * (-0.5 + 0.6) = -0.4; averaged over tokens it would be +0.1."""
    for padding in (0, 5):
        logp = torch.full((2, 8 + padding), NAN)
        reference, mask = logp.clone(), torch.zeros(2, 8 + padding).bool()
        for row, (length, value, ref) in enumerate([(2, -1.0, -1.2), (8, -0.5, -0.6)]):
            mask[row, :length], logp[row, :length], reference[row, :length] = True, value, ref
        policy, ref = (trajectory_logprobs(values, mask, torch.tensor([0, 1]), 2) for values in (logp, reference))
        loss, metrics = dpo_loss(policy[:1], policy[1:], ref[:1], ref[1:], ONE)
        close(metrics["margin"], -0.4)
        close(loss, 0.713347, 1e-6)


def test_a_trajectory_is_the_sum_of_its_rows_and_trains_no_other_token():
    """The two agent turns of one dialogue as two rows, in any order among the rows of others; G44."""
    model, tokens = tiny(), [11, 12, 21, 22, 31, 32, 33, 23, 24]
    rows = [(tokens[:7], tokens[7:]), ([40], [41, 42, 43]), (tokens[:2], tokens[2:4])]
    logp, mask = token_logprobs(model, *zip(*rows), 1.0)
    got = trajectory_logprobs(logp, mask, torch.tensor([0, 1, 0]), 2)
    full = model(torch.tensor([tokens])).logits.log_softmax(-1)
    close(got[0].detach(), sum(full[0, t - 1, tokens[t]].item() for t in (2, 3, 7, 8)))
    close(got[1].detach(), logp[1, :3].sum().item())
    slope = torch.autograd.grad(got[0], logp)[0]
    assert slope.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 0]]


def test_dpo_of_micro_batches_adds_up():
    generator = torch.Generator().manual_seed(0)
    four, weight = torch.randn(4, 6, generator=generator), torch.full((6,), 1 / 6)
    whole, metrics = dpo_loss(*four, weight)
    parts = [dpo_loss(*four[:, some], weight[some]) for some in ([0, 3], [1, 2, 4, 5])]
    close(whole, sum(loss for loss, _ in parts))
    for name, value in metrics.items():
        close(value, sum(m[name] for _, m in parts))


def test_dpo_starts_at_exactly_zero_without_dropout():
    """S09, G37. A copy as reference: equal log-probs to the last bit; dropout left on would give a margin; nothing flows to the reference."""
    model, reference = tiny("gpt2", dropout=0.1), tiny("gpt2", dropout=0.1)
    reference.load_state_dict(model.state_dict())
    rows = [([1, 2, 3], [4, 5, 6]), ([1, 2, 3], [7, 8])]

    def both(model):
        return trajectory_logprobs(*token_logprobs(model, *zip(*rows), 1.0), torch.tensor([0, 1]), 2)

    policy, ref = both(model), both(reference)
    loss, metrics = dpo_loss(policy[:1], policy[1:], ref[:1], ref[1:], ONE)
    loss.backward()
    assert metrics["margin"] == 0 and grads(model).abs().max() > 0 and all(p.grad is None for p in reference.parameters())
    model.train()
    assert not torch.equal(both(model), policy)


def test_losses_equal_trls(tmp_path):
    """The first loss of TRL's own trainers on the same ids, policy and reference. TRL is no dependency."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(Path(grpo.__file__).parent / "data" / "tiny")
    model, reference = tiny(vocab=len(tokenizer)), tiny(vocab=len(tokenizer))
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(0.9)
    how = dict(output_dir=str(tmp_path), per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False, max_length=None,
               gradient_checkpointing=False, disable_tqdm=True)
    texts = [("A table for a few of us.", "How many people will it be?", "Booked for 3."), ("A cheap hotel.", "Which area?", "I booked one.")]

    data = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row)) for row in texts])
    trainer = trl.DPOTrainer(model, ref_model=reference, args=trl.DPOConfig(beta=0.1, **how), train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    rows = [(ids[:mask.tolist().index(1)].tolist(), ids[mask.bool()].tolist()) for ids, mask in zip(batch["input_ids"], batch["completion_mask"])]
    policy, ref = (trajectory_logprobs(*token_logprobs(m.eval(), *zip(*rows), 1.0), torch.arange(4), 4) for m in (model, reference))
    loss, metrics = dpo_loss(policy[:2], policy[2:], ref[:2], ref[2:], torch.full((2,), 0.5))
    assert metrics["margin"].abs() > 1e-3
    close(loss, trainer.compute_loss(model, batch).detach())

    data = Dataset.from_list([{"prompt": prompt, "completion": completion} for prompt, completion, _ in texts])
    trainer = trl.SFTTrainer(model, args=trl.SFTConfig(**how), train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    rows = [(ids[:(labels != -100).tolist().index(True)].tolist(), ids[labels != -100].tolist())
            for ids, labels in zip(batch["input_ids"], batch["labels"])]
    logp, mask = token_logprobs(model.eval(), *zip(*rows), 1.0)
    close(sft_loss(logp, mask, token_mean(mask))[0], trainer.compute_loss(model, batch).detach())


# ---- sample ----------------------------------------------------------------------------------------------------------

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
HOW = dict(max_new_tokens=6, temperature=1.0, eos_ids=[3, 9], pad_id=0)


def spy(model, monkeypatch):
    """Let generate() also return its scores; keep them, the config in force and the ids for the test."""
    seen = SimpleNamespace()
    real = model.generate

    def generate(**kwargs):
        seen.modes = [module.training for module in model.modules()]
        out = real(**kwargs, output_scores=True, output_logits=True, return_dict_in_generate=True)
        seen.scores, seen.logits = torch.stack(out.scores, 1), torch.stack(out.logits, 1)
        seen.cache = out.past_key_values
        return out.sequences

    monkeypatch.setattr(model, "generate", generate)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recomputed_log_probs_equal_the_samplers(kind, temperature, monkeypatch):
    """G33, G34, G35, C07: same ids, same distribution."""
    model = tiny(kind)
    seen = spy(model, monkeypatch)
    completions = sample(model, PROMPTS, 8, **{**HOW, "temperature": temperature, "eos_ids": range(8)})
    with torch.no_grad():
        logp, mask = token_logprobs(model, PROMPTS, completions, temperature, pad_id=0)
    assert mask.sum() > 30 and len({len(c) for c in completions}) > 1
    sampler = (seen.logits / temperature).log_softmax(-1)
    numbers = torch.cat([torch.rand(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)])
    for b, completion in enumerate(completions):
        close(logp[b, :len(completion)], sampler[b, range(len(completion)), completion], 1e-4)
        for t, token in enumerate(completion):  # drawn from that distribution: the row's own number lies in the token's share of [0, 1)
            below, above = sampler[b, t, :token].exp().sum(), sampler[b, t, :token + 1].exp().sum()
            assert below - 1e-5 <= numbers[b, t] <= above + 1e-5


def test_trained_ids_are_the_sampled_ids():
    """C07, G07: what was drawn stands unchanged, prompt-major, in the batch that is scored."""
    completions = sample(tiny(), PROMPTS, 3, **HOW)
    model = TableModel(torch.zeros(V, V))
    token_logprobs(model, PROMPTS, completions, 1.0)
    call = model.calls[0]
    kept = [row[keep.bool()].tolist() for row, keep in zip(call["input_ids"], call["attention_mask"])]
    assert kept == [PROMPTS[b // 3] + completions[b] for b in range(6)]


def test_cut_at_the_first_end_token_by_id():
    """G26: end == pad == 3. The third row starts with its end, the last has text after it."""
    class Scripted(torch.nn.Module):
        device, generation_config, config = torch.device("cpu"), SimpleNamespace(), None

        def get_decoder(self):
            return self

        def forward(self, **kwargs):  # keeps no cache
            return SimpleNamespace()

        def generate(self, input_ids, **kwargs):
            new = [[9, 8, 3, 3, 3], [9, 8, 7, 6, 5], [3, 3, 3, 3, 3], [9, 3, 4, 3, 3]]
            return torch.cat([input_ids, torch.tensor(new)], 1)

    got = sample(Scripted(), [[1], [2, 2]], 2, max_new_tokens=5, temperature=1.0, eos_ids=[3], pad_id=3)
    assert got == [[9, 8, 3], [9, 8, 7, 6, 5], [3], [9, 3]]  # the second one is truncated: its last id is no end


def test_completions_end_in_an_end_token_or_at_the_limit():
    """G28, several end tokens, pad equal to one of them."""
    completions = sample(tiny(), [[1, 2]], 64, max_new_tokens=20, temperature=2.0, eos_ids=[3, 9, 11], pad_id=9)
    ends = {c[-1] for c in completions if len(c) < 20}
    assert ends == {3, 9, 11} and not any({3, 9, 11} & set(c[:-1]) for c in completions)


@pytest.mark.parametrize("kind", SHARING)
def test_greedy_batch_equals_each_prompt_alone(kind):
    """G32: the prompts are padded on the left; or begin alike, and are padded behind that."""
    model, how = tiny(kind), {**HOW, "temperature": 0}
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [10] * 12]
    for some in (prompts, LAYOUTS["shared and padded"][0]):
        assert sample(model, some, **how) == [sample(model, [p], **how)[0] for p in some]
    twice = sample(model, prompts[:1], 2, **how)
    assert twice[0] == twice[1]
    with torch.no_grad():  # and it is the argmax
        assert twice[0][0] == model(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax().item()


@pytest.mark.parametrize("kind", SHARING)
def test_a_draw_depends_on_its_prompt_and_seed_alone(kind):
    """Not on the prompts beside it, nor on how many completions there are."""
    model, how = tiny(kind), {**HOW, "max_new_tokens": 10}
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [10] * 12, [1, 2, 3]]
    together = sample(model, prompts, 3, **how)
    alone = [c for k, p in enumerate(prompts) for c in sample(model, [p], 3, seed=k, **how)]
    assert together == alone and together[:3] != together[9:]
    assert [together[3 * k] for k in range(4)] == sample(model, prompts, 1, **how)
    with pytest.raises(AssertionError, match="4 prompts need as many seeds, not 3"):
        grpo.sample(model, prompts, 3, seeds=[0, 1, 2], **how)


@pytest.mark.parametrize("kind", KINDS)
def test_dropping_ended_rows_changes_nothing(kind, monkeypatch):
    """Stretches of 1, 2 and 5 tokens give what one stretch gives."""
    model, how = tiny(kind), {**HOW, "max_new_tokens": 11, "eos_ids": range(0, V, 3)}
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [10] * 12, [20], [30, 31]]
    for temperature in (0, 1.0):
        how["temperature"] = temperature
        want = sample(model, prompts, 2, **how, stretch=100)
        assert len({len(c) for c in want}) > 1
        assert want == sample(model, prompts, 2, **how, stretch=1) == sample(model, prompts, 2, **how, stretch=2) == sample(model, prompts, 2, **how, stretch=5)
    how |= {"eos_ids": []}
    want = sample(model, prompts, 2, **how, stretch=100)
    monkeypatch.setattr(transformers.DynamicCache, "batch_select_indices", None)  # nothing is copied while all rows are on
    assert want == sample(model, prompts, 2, **how, stretch=4)


def test_ended_rows_are_not_computed_on():
    """Rows end after 1, 2, 3 and 8 tokens; with stretches of 2 the four are followed by two and by one, and their prompts go with them."""
    table = torch.full((V, V), -1e4)
    table[torch.arange(V - 1), torch.arange(1, V)] = 0  # token n is followed by n + 1; the end is 10
    model, rows = tiny(), []
    forward, real = model.forward, model.generate
    model.forward = lambda input_ids, **kwargs: type(out := forward(input_ids, **kwargs))(**{**out, "logits": table[input_ids]})
    model.generate = lambda **kwargs: rows.append((len(kwargs["input_ids"]), len(kwargs["cache"].layers[0].keys))) or real(**kwargs)
    got = sample(model, [[1, 9], [1, 8], [1, 7], [1, 2]], max_new_tokens=20, temperature=1.0, eos_ids=[10], pad_id=0, stretch=2)
    assert got == [[10], [9, 10], [8, 9, 10], [3, 4, 5, 6, 7, 8, 9, 10]] and rows == [(4, 4), (2, 2), (1, 1), (1, 1)]


@pytest.mark.parametrize("kind", [*KINDS, "qwen3", "cohere", "granite"])
def test_prompts_are_held_once(kind, monkeypatch):
    """Four completions of each of two prompts, stretches of 4: keys and values of the prompts are held for two rows, those of the tokens
    themselves in one buffer a stretch, which goes with the cache. The same ids as with each prompt repeated, which is what `eager` does."""
    model, how, seen = tiny(kind), {**HOW, "max_new_tokens": 10, "eos_ids": range(4), "stretch": 4}, []
    real = model.generate

    def generate(cache, **kwargs):
        out = real(cache=cache, **kwargs)
        assert once or len(cache.layers[0].keys) == len(kwargs["input_ids"])
        if once:
            keys, own, rows = cache.layers[0].keys, cache.layers[0].own[0], len(kwargs["input_ids"])
            seen.append((len(keys), rows, len(own), own.shape[2], weakref.ref(own)))
            assert own.untyped_storage().nbytes() == own[:, :, :1].nbytes * 4 * len(seen)
        return out

    model.generate, once = generate, True
    gc.collect()
    gc.disable()
    try:
        got = sample(model, PROMPTS, 4, **how)
        prompts, rows, own, tokens, buffers = zip(*seen)
        assert rows[0] == 8 > rows[1] and own == rows and tokens == (4, 8, 10)[:len(tokens)] and set(prompts) <= {1, 2}
        assert all(buffer() is None for buffer in buffers)
    finally:
        gc.enable()
    once = False
    model.set_attn_implementation("eager")
    assert got == sample(model, PROMPTS, 4, **how)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["DiffLlama", "JetMoe", "rotary falcon"])
def test_a_model_that_attends_in_a_way_of_its_own_gets_its_prompts_repeated(kind):
    """The first one splits values on the way to attention, the second repeats keys, the third calls torch by itself."""
    model, how = tiny(kind), {**HOW, "max_new_tokens": 10, "stretch": 4}
    got = sample(model, PROMPTS, 2, **how)
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "eager"
    assert got == sample(model, PROMPTS, 2, **how)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_behind_prompts_equals_attention_to_repeated_ones(dtype, tolerance, scaling):
    """Three prompts of 5, 2 and 0 tokens (of 6) with 2, 1 and 3 rows, 4 heads on 2 of keys, values wider than keys, 3 tokens of their own."""
    torch.manual_seed(0)
    rows, own, real = torch.tensor([0, 0, 1, 2, 2, 2]), 3, torch.tensor([5, 2, 0])
    attention = (torch.arange(6) >= 6 - real[rows][:, None]).long()
    cache = transformers.DynamicCache()
    cache.update(torch.randn(3, 2, 6, 8).to(dtype), torch.randn(3, 2, 6, 10).to(dtype), 0)
    keys, values = (x[rows] for x in (cache.layers[0].keys, cache.layers[0].values))
    assert grpo.hold_once(cache, attention, rows, torch.arange(6), own).tolist() == rows.tolist()
    for t in range(own):
        new = torch.randn(6, 2, 1, 8).to(dtype), torch.randn(6, 2, 1, 10).to(dtype)
        keys, values = (torch.cat(x, 2) for x in zip((keys, values), new))
        got = cache.update(*new, 0)
        assert cache.get_seq_length() == 6 + t + 1
    query, mask = torch.randn(6, 4, 1, 8).to(dtype), torch.cat([attention, torch.ones(6, own)], 1).bool()
    want = torch.nn.functional.scaled_dot_product_attention(query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), mask[:, None, None], scale=scaling)
    with torch.autocast("cpu", torch.bfloat16):  # changes nothing: scores are float32
        out, _ = grpo.attend(None, query, *got, None, scaling=scaling)
    assert out.dtype == dtype
    close(out.float(), want.transpose(1, 2).float(), tolerance)
    # the second prompt's row and one of the first's have ended: what is left moves up
    assert grpo.hold_once(cache, attention[[1, 3, 4]], rows[[1, 3, 4]], torch.tensor([1, 3, 4]), 2).tolist() == [0, 1, 1]
    new = torch.randn(3, 2, 1, 8).to(dtype), torch.randn(3, 2, 1, 10).to(dtype)
    keys, values = (torch.cat([x[[1, 3, 4]], y], 2) for x, y in zip((keys, values), new))
    mask, query = torch.cat([mask[[1, 3, 4]], torch.ones(3, 1).bool()], 1), query[:3]
    want = torch.nn.functional.scaled_dot_product_attention(query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), mask[:, None, None], scale=scaling)
    close(grpo.attend(None, query, *cache.update(*new, 0), None, scaling=scaling)[0].float(), want.transpose(1, 2).float(), tolerance)


def dialogues(model, kept, how):
    """Four turns of four dialogues, greedily: a prompt ends in 40, the next one has what the agent said (without its first two
    tokens, the "think") and up to six tokens of others behind that. Returns every turn's completions, and the tokens forwarded in each."""
    seen, turns, before, generate = [], [], {}, model.generate

    def narrow(input_ids, **kwargs):  # with what is kept, too, no row is wider than the longest prompt
        assert input_ids.shape[1] == max(map(len, prompts))
        return generate(input_ids=input_ids, **kwargs)

    model.generate = narrow
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))
    prompts = [SYSTEM + own + [40] for own in OWN[:3]] + [SYSTEM + OWN[0] + [40]]
    for turn in range(4):
        seen.clear()
        after = {}
        completions = sample(model, prompts, **how, kept=(before, after) if kept else None)
        turns.append((completions, sum(seen)))
        before = after
        prompts = [p + c[2:] + OWN[(i + turn) % 5] + [40] for i, (p, c) in enumerate(zip(prompts, completions))]
        prompts = prompts[1:] + prompts[:1] if turn < 2 else prompts[:2]  # other rows beside each other; then fewer
    return turns


@pytest.mark.parametrize("kind", [*SHARING, "falcon"])
def test_turns_of_a_dialogue_go_on_from_what_was_kept(kind):
    """Greedily the same tokens as with every prompt computed anew. The rows of a call differ in what is kept of them and in what is new."""
    how = {**HOW, "temperature": 0, "eos_ids": range(0, V, 3)}
    anew, kept = dialogues(tiny(kind), False, how), dialogues(tiny(kind), True, how)
    assert [c for c, _ in anew] == [c for c, _ in kept] and len({len(c) for turn, _ in anew for c in turn}) > 1
    fewer = [a > b for (_, a), (_, b) in zip(anew, kept)]
    assert fewer == ([False] * 4 if kind in COLUMNS else [False, True, True, True])


def test_only_what_is_new_in_a_prompt_is_computed():
    """One token is sampled, and each forwarded token counted. 9 system tokens, then rows of 6 and 2 more: 9 + 2 * 5 (padding counts) and 2 for
    the last tokens. The next prompts have 3 and 1 more: 2 * 3 and 2. What is not in the dict, of one row only, is computed as ever."""
    model, seen, kept = tiny(), [], {}
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))

    def forwarded(prompts, G=1):
        seen.clear()
        return sample(model, prompts, G, **{**HOW, "max_new_tokens": 1, "temperature": 0}, kept=(kept, kept)) and sum(seen)

    first = [SYSTEM + OWN[0], SYSTEM + OWN[1]]
    assert forwarded(first) == 9 + 2 * 5 + 2 and set(kept) == {tuple(p[:-1]) for p in first}
    second = [first[1] + [1], first[0] + [1, 2, 3]]
    assert forwarded(second) == 2 * 3 + 2
    rows = [kept[tuple(p[:-1])][1] for p in second]
    assert forwarded(second, 3) == 6  # a prompt that was there before: nothing but its last token, for each completion
    again = [kept[tuple(p[:-1])][1] for p in second]
    assert all(torch.equal(x, y) for xs, ys in zip(rows, again) for pair in zip(xs, ys) for x, y in zip(*pair))
    assert forwarded([[1, 2], [3]]) == 2 + 2 and (1,) in kept and () not in kept
    assert forwarded([first[0][:-1]]) == 13 + 1  # there, but for what predicts the next token: as ever, its last token on its own
    assert forwarded(second + [SYSTEM + [49]]) == 9 + 3 * 8 + 3
    for (kind, layers) in kept.values():
        assert kind is transformers.DynamicCache and not any(x.requires_grad for layer in layers for x in layer)


def test_keys_and_values_are_kept_as_far_as_memory_is_granted(monkeypatch):
    """2 layers, keys and values of 16 float32 each: 256 bytes a token. A call that would exceed the limit adds nothing."""
    monkeypatch.setattr(grpo.keep, "__defaults__", (256 * 20,))
    model, kept = tiny(), {}
    for prompts, tokens in (([SYSTEM, SYSTEM + [1]], 8 + 9), ([SYSTEM[:5]], 17), ([SYSTEM[:4]], 20)):
        sample(model, prompts, 2, **{**HOW, "max_new_tokens": 1}, kept=({}, kept))
        assert sum(map(len, kept)) == tokens
    assert sum(x.nbytes for _, layers in kept.values() for layer in layers for x in layer) == 256 * 20


HIDDEN = dict(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, typical_p=0.9, repetition_penalty=1.05,
              no_repeat_ngram_size=1, min_new_tokens=4, suppress_tokens=[5, 6], begin_suppress_tokens=[7],
              bad_words_ids=[[8]], sequence_bias=[[[10], 9.0]], epsilon_cutoff=0.01, eta_cutoff=0.01, max_time=1e-9,
              forced_eos_token_id=3, eos_token_id=12, pad_token_id=13, guidance_scale=2.0, top_h=0.5, num_beams=2,
              num_return_sequences=2, max_length=4, min_length=5, prompt_lookup_num_tokens=3, use_cache=False,
              renormalize_logits=True, exponential_decay_length_penalty=(1, 2.0))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0])
@pytest.mark.parametrize("hidden", [{}, HIDDEN])
def test_no_hidden_sampling_default_is_left(temperature, hidden, monkeypatch):
    """G35: whatever the model's folder asks for, the ids are the same, and nothing but the draw has changed the scores."""
    model = tiny(vocab=64)  # more than 50, the top_k of transformers
    config = model.generation_config
    plain = sample(model, PROMPTS, 2, **{**HOW, "temperature": temperature})
    for name, value in hidden.items():
        setattr(config, name, value)
    seen = spy(model, monkeypatch)
    assert sample(model, PROMPTS, 2, **{**HOW, "temperature": temperature}) == plain
    if temperature == 0:
        close(seen.scores, seen.logits, 0)
    else:
        assert seen.scores.unique().tolist() == [0, 1] and (seen.scores.sum(-1) == 1).all()
    assert model.generation_config is config and all(getattr(config, name) == value for name, value in hidden.items())


def test_every_token_of_the_vocabulary_can_be_sampled():
    """G35: 64 of them, because the top_k that transformers applies by itself is 50."""
    model = tiny(vocab=64).requires_grad_(False)
    model.lm_head.weight.mul_(0.1)  # all tokens about equally likely
    completions = sample(model, [[1]], 64, max_new_tokens=20, temperature=1.0, eos_ids=[], pad_id=0)
    assert {token for c in completions for token in c} == set(range(64)) and {len(c) for c in completions} == {20}


@pytest.mark.parametrize("number, want", [(0.0, 1), (1 - 2 ** -53, 48)])
def test_the_ends_of_the_unit_interval_draw_what_has_a_chance(number, want, monkeypatch):
    """Tokens 0 and 49 have none, 48 has 2e-9: less than float32 can tell from 0 beside a sum of 1."""
    model = tiny()
    logits = torch.tensor([-torch.inf, *[0.] * (V - 3), -16., -torch.inf])
    model.lm_head.forward = lambda hidden: logits.expand(*hidden.shape[:2], V)
    monkeypatch.setattr(torch, "rand", lambda *size, dtype, generator: torch.full(size, number, dtype=dtype))
    assert sample(model, PROMPTS, 2, **{**HOW, "eos_ids": []}) == [[want] * 6] * 4


@pytest.mark.parametrize("logit", [NAN, torch.inf])
def test_logits_that_are_no_numbers_are_not_sampled(logit):
    model = tiny()
    model.lm_head.forward = lambda hidden: torch.full((*hidden.shape[:2], V), logit)
    with pytest.raises(FloatingPointError, match="no numbers"):
        sample(model, PROMPTS, 2, **HOW)


def test_a_call_is_reproducible_and_leaves_the_random_stream_alone():
    model = tiny()
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = [sample(model, PROMPTS, 2, **{**HOW, "seed": s}) for s in (0, 0, 1)]
    assert torch.equal(torch.rand(3), want)
    assert one == two != other


@pytest.mark.parametrize("fails", [False, True])
def test_sampling_runs_in_eval_mode_with_cache_and_restores_the_modes(fails, monkeypatch):
    """G45, also when generate() raises. A submodule that was frozen in eval mode stays there."""
    model = tiny("gpt2", dropout=0.5)
    how = {**HOW, "temperature": 0, "max_new_tokens": 8}
    before = sample(model, PROMPTS, **how)
    model.activation_checkpointing_enable()
    model.config.use_cache = False
    model.train()
    model.transformer.drop.eval()
    modes = [module.training for module in model.modules()]
    seen = spy(model, monkeypatch)
    config = model.generation_config
    if fails:
        with pytest.raises(IndexError):
            sample(model, [[V]], **how)  # an id beyond the vocabulary
    else:
        assert sample(model, PROMPTS, **how) == before
        assert seen.cache.get_seq_length() > 5
    assert model.generation_config is config
    assert not any(seen.modes)
    assert [module.training for module in model.modules()] == modes and model.training


def test_no_prompts_no_completions():
    assert sample(tiny(), [], 2, **HOW) == []


# ---- precision -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype, moved", [(torch.float32, True), (torch.bfloat16, False)])
def test_weights_of_a_bfloat16_folder_must_be_trained_in_float32(dtype, moved, tmp_path):
    """One AdamW step at lr 1e-6 is below half a bfloat16 step for nearly every weight: nothing moves."""
    tiny().to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    before = [p.detach().clone() for p in model.parameters()]
    logp, mask = token_logprobs(model, [[1, 2]], [list(range(V))], 1.0)
    weight = row_weights(torch.tensor([V]), torch.tensor([True]), "sequence", V)
    policy_loss(logp, logp, torch.tensor([1.]), mask, weight, (0.2, 0.2))[0].backward()
    torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0).step()
    changed = sum((p != q).sum().item() for p, q in zip(model.parameters(), before))
    share = changed / sum(p.numel() for p in before)
    assert share > 0.5 if moved else share < 0.05


def test_head_in_float32():
    """G38 in the head that the loop uses: log-softmax of [20, 10, 0], given in bfloat16."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Identity()

        def get_decoder(self):
            return self.body

        def get_output_embeddings(self):
            return SimpleNamespace(weight=torch.zeros(3, 1))

        def forward(self, input_ids, **kw):
            return SimpleNamespace(logits=torch.tensor([[[20.0, 10.0, 0.0]] * 3], dtype=torch.bfloat16))
    logp = head_logprobs(Model(), SimpleNamespace, torch.zeros(3, 1), torch.tensor([0, 1, 2]), 1.0)
    torch.testing.assert_close(logp, torch.tensor([-4.54e-05, -10.0000454, -20.0000454]), atol=1e-5, rtol=0)
