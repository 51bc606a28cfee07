"""The benchmark of large models answers every question, with and without teams of GPUs."""

import math

from benchmarks import recommend_large


def test_every_question_has_an_answer(monkeypatch):
    tiny = recommend_large.Sizes(2, 4096, 32, 8, 14336, 1000)
    monkeypatch.setattr(recommend_large, "MODELS", {"tiny": tiny})
    alone = list(recommend_large.all_rows(["tiny"], ["aws"], []))
    split = list(recommend_large.all_rows(["tiny"], ["aws"], [2, 4, 8]))
    assert [r.question for r in alone] == ["price"] * 3 + ["time"] * 3
    assert [r.question for r in split] == ["price"] * 3 + ["time"] * 3 + ["soon"] * 3
    assert all(math.isfinite(r.value) and r.value <= r.others[0] * (1 + 1e-3) for r in (*alone, *split))
