"""Usage of API keys since the last write to the database."""

from router.admission.usage import UsageCounter, UsageTotals


def test_requests_are_added_up_by_key_and_model_until_they_are_drained():
    counter = UsageCounter()
    for key, model, failed in (("a", "m", False), ("a", "m", True), ("a", "n", False), ("b", "m", True)):
        counter.get_totals(key, model).count(10, 4, 3, failed=failed)
    assert counter.drain() == {
        ("a", "m"): UsageTotals(2, 1, 20, 8, 6),
        ("a", "n"): UsageTotals(1, 0, 10, 4, 3),
        ("b", "m"): UsageTotals(1, 1, 10, 4, 3),
    }
    assert counter.drain() == {}
    counter.get_totals("a", "m").count(1, 0, 0, failed=False)
    assert counter.drain() == {("a", "m"): UsageTotals(1, 0, 1, 0, 0)}


def test_totals_are_added_field_by_field():
    totals = UsageTotals(1, 2, 3, 4, 5)
    totals.add(UsageTotals(10, 20, 30, 40, 50))
    totals.add(UsageTotals(100, 200, 300, 400, 500))
    assert totals == UsageTotals(111, 222, 333, 444, 555)
