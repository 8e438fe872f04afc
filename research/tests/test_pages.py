"""The pages of the studies have the numbers of the stored results."""

from research import alarm_table, validate_signals


def test_the_page_of_the_signals_is_that_of_the_stored_results():
    page = validate_signals.PAGE.read_text().partition(validate_signals.MARK)[2]
    assert page.strip() == validate_signals.page_tables().strip()


def test_the_table_of_the_alarm_has_every_stream():
    rows = alarm_table.table(seeds=1).splitlines()[2:]
    names = [line.split(" | ")[0].strip("| *") for line in rows]
    assert names == list(alarm_table.STREAMS)
