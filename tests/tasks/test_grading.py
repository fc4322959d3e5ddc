"""Tests grading: extraction, a table of pairs, distinct outcomes, bounded time on hostile input, real references."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from otb.tasks import grading
from otb.tasks.grader_process import GraderPool, GraderProcess
from otb.tasks.grading import Outcome, extract_answer, grade, grade_batch, normalised, number
from tests.support.waiting import PATIENCE_SECONDS, alive, wait_for

ROOT = Path(__file__).parents[2]

CORRECT = [
    ("18", "18"),
    ("+18", "18"),
    ("-3", "-3"),
    ("025", "25"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    ("1 234 567", "1234567"),
    ("32,\\!348", "\\$32,\\!348"),
    ("18.0", "18"),
    ("0.5", "\\frac{1}{2}"),
    (".5", "1/2"),
    ("\\dfrac12", "0.50"),
    ("\\tfrac{2}{4}", "\\frac{1}{2}"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("0.333333", "\\frac{1}{3}"),
    ("$18$", "18"),
    ("$\\frac{3}{4}$", "0.75"),
    ("\\$18.90", "18.9"),
    ("-\\$5", "-5"),
    ("18.", "18"),
    ("50\\%", "50"),
    ("50%", "50\\%"),
    ("18\\text{ dollars}", "18"),
    ("5.4", "5.4 \\text{ cents}"),
    ("90^\\circ", "90"),
    ("\\text{east}", "east"),
    ("\\text{(C)}", "C"),
    ("\\textbf{(073)}", "073"),
    ("x=5", "5"),
    ("2\\sqrt{3}", "\\sqrt{12}"),
    ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"),
    ("2^{10}", "1024"),
    ("x^2+2x+1", "(x+1)^2"),
    ("c+b+a", "a + b + c"),
    ("(\\sin t)^2", "\\sin^2 t"),
    ("\\{2,1\\}", "\\{1,2\\}"),
    ("3, 1", "1,3"),
    ("[1,2)", "\\left[1,2\\right)"),
    ("(-\\infty,2)\\cup(3,\\infty)", "(3,\\infty) \\cup (-\\infty,2)"),
    ("\\left(3,\\frac{\\pi}{2}\\right)", "(3,\\pi/2)"),
    ("\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("1\\frac{1}{2}", "1.5"),
    ("3+2i", "2i+3"),
    ("\\frac{\\pi}{4}", "0.25\\pi"),
]

WRONG = [
    ("17", "18"),
    ("-18", "18"),
    ("1.234", "1234"),
    ("0.33", "\\frac{1}{3}"),
    ("0.5", "50\\%"),
    ("\\frac{2}{1}", "\\frac{1}{2}"),
    ("\\text{west}", "\\text{east}"),
    ("\\text{(B)}", "\\text{(C)}"),
    ("x=6", "5"),
    ("(1,2]", "[1,2)"),
    ("\\{1,3\\}", "\\{1,2\\}"),
    ("(2,1)", "(1,2)"),
    ("2\\sqrt{3}", "3\\sqrt{2}"),
    ("x^2+1", "(x+1)^2"),
    ("\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("\\frac{1}{0}", "1"),
]


@pytest.mark.parametrize(("answer", "reference"), CORRECT)
def test_grading_accepts_an_equivalent_answer(answer, reference):
    found = grade(f"So it is $\\boxed{{{answer}}}$.", reference)
    assert (found.outcome, found.reward) == (Outcome.CORRECT, 1.0), found


@pytest.mark.parametrize(("answer", "reference"), WRONG)
def test_grading_refuses_another_answer(answer, reference):
    found = grade(f"So it is $\\boxed{{{answer}}}$.", reference)
    assert (found.outcome, found.reward) == (Outcome.WRONG, 0.0), found


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{5}", "5"),
        ("first \\boxed{4}, no: \\boxed {5} it is", "5"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{3} and then, cut off, \\boxed{\\frac{1}", "3"),
        ("\\boxed{cut off \\boxed{4}", "4"),
        ("\\boxed{cut off", None),
        ("\\boxed5", None),
        ("\\boxed{}", ""),
        ("work\n#### 1,200", "1,200"),
        ("#### 3\n#### $-4.50 ", "$-4.50"),
        ("#### Step 2: add\nso it is 5", None),
        ("#### 3 then \\boxed{4}", "4"),
        ("The answer is 5.", None),
        ("Answer: 5", None),
        ("", None),
    ],
)
def test_extraction_takes_the_last_balanced_box_or_the_last_hashes_and_nothing_else(text, answer):
    assert extract_answer(text) == answer


def test_extraction_with_a_marker_reads_the_last_line_that_starts_with_it():
    text = "Answer: 3\nthe Answer: 9 is not at the start\n**Answer:** $34$\n"
    assert extract_answer(text, marker="Answer:") == "$34$"
    assert extract_answer("no such line", marker="Answer:") is None
    assert extract_answer("Answer: 3 \\boxed{4}", marker="Answer:") == "4"
    assert grade(text, "34", marker="Answer:").outcome is Outcome.CORRECT


def test_grading_keeps_a_missing_and_an_unreadable_answer_apart_from_a_wrong_one():
    missing, unreadable = grade("I do not know", "5"), grade("\\boxed{\\}}", "5")
    assert missing.outcome is unreadable.outcome is Outcome.UNPARSABLE
    assert (missing.answer, missing.reward, unreadable.reward) == (None, 0.0, 0.0)


def test_grading_leaves_a_rollout_unscored_when_the_reference_cannot_be_read():
    found = grade("\\boxed{4}", "\\text{(E)},")
    assert (found.outcome, found.reward) == (Outcome.GRADER_ERROR, None)
    assert "reference" in found.detail


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234", "1234"), ("-0.50", "-1/2"), ("\\frac34", "3/4"), ("-6/8", "-3/4"), ("1 000", "1000")],
)
def test_number_reads_plain_numbers_exactly(text, value):
    assert str(number(text)) == value


@pytest.mark.parametrize("text", ["", ".", "-", "1,2", "12,34", "1/0", "x", "1e5", "\\sqrt{2}", "1 2", "9" * 100])
def test_number_leaves_everything_else_to_math_verify(text):
    assert number(text) is None


def test_the_shortcut_for_numbers_agrees_with_math_verify():
    rng = random.Random(0)
    forms = ["{0}", "-{0}", "{0}.{1}", "{0}/{1}", "\\frac{{{0}}}{{{1}}}", "{0},00{1}", "{0}.0"]
    answers = [rng.choice(forms).format(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(300)]
    pairs = list(zip(answers, rng.sample(answers, len(answers)), strict=True))
    process = GraderProcess()
    try:
        for answer, reference in pairs:
            quick = grading._grade_cheaply(answer, reference)
            slow, _ = process.compare(normalised(answer), normalised(reference))
            assert quick is not None and quick.outcome == slow, (answer, reference)
    finally:
        process.close()


@pytest.fixture
def asked(monkeypatch):
    """Returns the list to which every pair sent to math-verify is added."""
    pairs, compare = [], grading._pool.compare
    monkeypatch.setattr(grading._pool, "compare", lambda *pair: pairs.append(pair) or compare(*pair))
    return pairs


def test_plain_answers_are_graded_without_math_verify(asked):
    # Responses of 30 KB, about 8192 tokens, full of braces before the final box.
    texts = ["\\frac{1}{2} + " * 2_300 + f"\\boxed{{{i}}}" for i in range(64)]
    grades = grade_batch(texts, [f"{i}.0" for i in range(64)])
    assert all(found.outcome is Outcome.CORRECT for found in grades) and asked == []


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 15_000,
        "\\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
        "{" * 100_000,
        "####" * 25_000,
        "#### " + "1" * 100_000 + "x",
        "\\boxed{" + "9" * 100_000 + "}",
        "\\" * 100_000 + "boxed{1",
    ],
    ids=["open boxes", "nested braces", "open braces", "hashes", "long number", "long box", "backslashes"],
)
def test_hostile_text_of_100_kb_is_refused_in_linear_time_and_without_math_verify(text, asked):
    started = time.process_time()
    found = grade(text, "5", marker="Answer:")
    # CPU time, measured as 0.01 s; quadratic time would take minutes.
    assert time.process_time() - started < 5.0
    assert found.outcome is Outcome.UNPARSABLE and asked == []


def test_answers_that_never_end_are_timeouts_and_unscored_and_leave_the_grader_working(asked):
    handler = signal.getsignal(signal.SIGALRM)
    hostile = ["9^{9^{9^9}}", "((((10!)!)!)!)!", "10^{10^{10}}+1"]
    grades = grade_batch([f"\\boxed{{{answer}}}" for answer in hostile] * 20, ["5"] * 60)
    assert sorted(asked) == [(answer, "5") for answer in sorted(hostile)]  # each is tried once
    assert {(found.outcome, found.reward) for found in grades} == {(Outcome.GRADER_TIMEOUT, None)}
    assert grade("\\boxed{\\sqrt{4}}", "2").outcome is Outcome.CORRECT
    assert all(process.child.poll() is None for process in grading._pool.idle)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_comparison_that_failed_is_tried_again_and_one_that_timed_out_is_not(monkeypatch):
    verdicts = [("error", "the grader process ended with code -9"), ("correct", ""), ("timeout", "no verdict")]
    monkeypatch.setattr(grading._pool, "compare", lambda *pair: verdicts.pop(0))
    failed = grade("\\boxed{\\sqrt{361}}", "19")
    assert (failed.outcome, failed.detail) == (Outcome.GRADER_ERROR, "the grader process ended with code -9")
    assert [grade("\\boxed{\\sqrt{361}}", "19").outcome for _ in range(2)] == [Outcome.CORRECT] * 2
    assert [grade("\\boxed{\\sqrt{400}}", "20").outcome for _ in range(2)] == [Outcome.GRADER_TIMEOUT] * 2
    grading._verdict_of_math_verify.cache_clear()  # the timeout was made up here


def test_grading_works_in_threads_and_in_a_forked_process():
    found = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: grade(f"\\boxed{{\\sqrt{{{i * i}}}}}", str(i)).outcome}))
        for i in range(1, 7)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(1, 7), Outcome.CORRECT)

    code = (
        "import os; from otb.tasks.grading import grade; assert grade(r'\\boxed{\\sqrt{9}}', '3').reward == 1\n"
        "pid = os.fork()\n"
        "reward = grade(r'\\boxed{\\sqrt{16}}', '4' if pid else '5').reward\n"
        "assert reward == (1 if pid else 0), reward\n"
        "assert pid == 0 or os.waitpid(pid, 0)[1] == 0"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True, timeout=PATIENCE_SECONDS)


def cpu(pid: int) -> float:
    """Returns the CPU seconds that a process has used."""
    return psutil.Process(pid).cpu_times().user


def wait_until_at_work(pid: int, done: float) -> None:
    """Waits until a grader process is in the middle of a comparison: it has used more CPU seconds than `done`."""
    wait_for(lambda: cpu(pid) > done + 0.05)


def kill_at_work(child: subprocess.Popen, done: float) -> None:
    wait_until_at_work(child.pid, done)
    child.kill()


def test_a_grader_process_that_dies_is_an_error_and_is_replaced():
    pool = GraderPool(size=1)
    assert pool.compare("\\sqrt{4}", "2") == ("correct", "")
    pool.idle[0].child.kill()  # while idle: replaced unnoticed
    pool.idle[0].child.wait()
    assert pool.compare("\\sqrt{4}", "2") == ("correct", "")
    killer = threading.Thread(target=kill_at_work, args=[pool.idle[0].child, cpu(pool.idle[0].child.pid)])
    killer.start()
    verdict, detail = pool.compare("9^{9^{9^9}}", "2")
    killer.join()
    assert (verdict, detail) == ("error", "the grader process ended with code -9")
    assert pool.compare("\\sqrt{4}", "2") == ("correct", "")
    pool.close()


def test_a_grader_process_ends_with_its_parent_even_amid_an_endless_comparison():
    code = (
        "import os, threading; from otb.tasks.grader_process import GraderProcess; g = GraderProcess()\n"
        "from tests.tasks.test_grading import cpu, wait_until_at_work; done = cpu(g.child.pid)\n"
        "threading.Thread(target=g.compare, args=('9^{9^{9^9}}', '2'), daemon=True).start()\n"
        "wait_until_at_work(g.child.pid, done); print(g.child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, timeout=PATIENCE_SECONDS)
    wait_for(lambda: not alive(int(killed.stdout)))


def _shared_data() -> Path:
    shared = os.environ.get("OTB_SHARED")
    if not shared:
        pytest.skip("OTB_SHARED is not set: the folder whose data/ holds gsm8k, math500, aime24, ...")
    return Path(shared) / "data"


def _column(file: str, *keys: str) -> list:
    """Returns a column of a jsonl or parquet file; further keys select nested cells."""
    path = _shared_data() / file
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    for key in keys:
        rows = [row[key] for row in rows]
    return rows


def _not_correct(texts: list[str], references: list[str]) -> list:
    grades = grade_batch(texts, references)
    return [(g, r) for g, r in zip(grades, references, strict=True) if g.outcome is not Outcome.CORRECT]


def test_every_real_reference_equals_itself():
    references = _column("math500/test.parquet", "answer")
    references += _column("math_lvl3to5/train.parquet", "reward_model", "ground_truth")
    for year in ("aime24", "aime25"):
        references += [str(answer) for answer in _column(f"{year}/test.parquet", "answer")]
    references += [f"{answer:g}" for answer in _column("amc23/test.parquet", "answer")]
    empty = [reference for reference in references if not reference]
    assert len(empty) == 2  # both in math_lvl3to5, which therefore drops unanswered rows
    given = [reference for reference in references if reference]
    assert _not_correct([f"\\boxed{{{reference}}}" for reference in given], given) == []


def test_math_verify_itself_reads_nearly_every_math500_reference():
    references = sorted(set(_column("math500/test.parquet", "answer")))
    outcomes = [grading._grade_by_math_verify(reference, reference).outcome for reference in references]
    assert outcomes.count(Outcome.CORRECT) >= 0.995 * len(outcomes)


def test_every_gsm8k_solution_grades_correct():
    for split in ("train", "test"):
        solutions = _column(f"gsm8k/{split}.jsonl", "answer")
        assert _not_correct(solutions, [text.rpartition("####")[2].strip() for text in solutions]) == []


def test_every_math500_solution_grades_correct():
    texts, references = _column("math500/test.parquet", "solution"), _column("math500/test.parquet", "answer")
    assert _not_correct(texts, references) == []


def test_aime24_solutions_grade_correct_but_for_the_one_without_a_box():
    texts, references = _column("aime24/test.parquet", "solution"), _column("aime24/test.parquet", "answer")
    assert [(found.answer, reference) for found, reference in _not_correct(texts, references)] == [(None, "204")]
