"""The words of a private dialect in the product only become fewer."""

from word_counts import KINDS, ceilings, counts, uses


def test_no_word_is_used_more_often_and_each_ceiling_is_the_count():
    known = ceilings()
    now = counts(frozenset(known))
    more = {
        (word, kind): (have, most)
        for word in known
        for kind, have, most in zip(KINDS, now[word], known[word], strict=True)
        if have > most
    }
    assert not more, explain(more)
    assert now == known, "some words are used less often: run `python tests/word_counts.py` to lower their ceilings"


def explain(more):
    where = [f"{u.path}:{u.line}: {u.word} ({u.kind})" for u in uses(frozenset(w for w, _ in more)) if u[:2] in more]
    return "\n".join([f"{key}: {have}, at most {most}" for key, (have, most) in more.items()] + where)
