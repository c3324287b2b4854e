from node.engine_process.quarantine import QUARANTINE_SECONDS, WINDOW_SECONDS, Quarantine


def test_a_model_that_killed_twice_is_kept_out_for_ten_minutes():
    quarantine = Quarantine()
    assert not quarantine.record_crash("m", 0.0)
    assert quarantine.list_bans(0.0) == ()
    assert not quarantine.record_crash("other", 1.0)
    assert quarantine.record_crash("m", 10.0)
    (ban,) = quarantine.list_bans(20.0)
    assert (ban.model, ban.seconds) == ("m", QUARANTINE_SECONDS - 10.0)
    assert "2 times" in ban.cause
    assert not quarantine.record_crash("m", 11.0), "the count begins at 0 again"
    assert quarantine.list_bans(20.0) == (ban,)
    assert quarantine.list_bans(10.0 + QUARANTINE_SECONDS) == ()


def test_crashes_outside_of_the_window_are_not_counted_together():
    quarantine = Quarantine()
    assert not quarantine.record_crash("m", 0.0)
    assert not quarantine.record_crash("m", WINDOW_SECONDS + 1)


def test_after_the_quarantine_two_crashes_are_needed_again():
    quarantine = Quarantine()
    quarantine.record_crash("m", 0.0)
    quarantine.record_crash("m", 1.0)
    assert not quarantine.record_crash("m", QUARANTINE_SECONDS + 2)
    assert quarantine.record_crash("m", QUARANTINE_SECONDS + 3)
