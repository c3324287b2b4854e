from node.engine_process.quarantine import SECONDS, WINDOW, Quarantine


def test_a_model_that_killed_twice_is_kept_out_for_ten_minutes():
    quarantine = Quarantine()
    assert not quarantine.died("m", 0.0)
    assert quarantine.bans(0.0) == ()
    assert not quarantine.died("other", 1.0)
    assert quarantine.died("m", 10.0)
    (ban,) = quarantine.bans(20.0)
    assert (ban.model, ban.seconds) == ("m", SECONDS - 10.0)
    assert "2 times" in ban.cause
    assert quarantine.bans(10.0 + SECONDS) == ()


def test_deaths_that_lie_far_apart_are_not_counted_together():
    quarantine = Quarantine()
    assert not quarantine.died("m", 0.0)
    assert not quarantine.died("m", WINDOW + 1)


def test_after_the_quarantine_it_takes_two_deaths_again():
    quarantine = Quarantine()
    quarantine.died("m", 0.0)
    quarantine.died("m", 1.0)
    assert not quarantine.died("m", SECONDS + 2)
    assert quarantine.died("m", SECONDS + 3)
