"""Views over what queries attended to: for the plans of a session, and over its whole tape."""

from __future__ import annotations

from kvtape.traces.view import ROW, View

__all__ = ["ATTENTION", "SCORED"]

SCORED = View(
    "scored",
    "One row per block and score event of the session itself: the attention it received, its rank, and whether the "
    "plan that followed gave it up. A policy may count some layers only, pool, or add up over time; `mass` in `scores` "
    "has every layer. What a dense pass measured beside the session is in `attention`.",
    (
        *ROW,
        ("seq", "the score event"),
        ("turn", "the turn"),
        ("kind", "whose queries: accumulated, window or probe"),
        ("layers", "the model layers that were measured, JSON"),
        ("queries", "how many queries"),
        ("block_id", "the block"),
        ("start", "first tape position"),
        ("stop", "one past the last"),
        ("mass", "attention summed over layers, heads, queries and the block's tokens"),
        ("mass_per_token", "the same / tokens of the block"),
        ("rank", "by mass_per_token among the blocks of the event; 1 is the most"),
        ("plan_seq", "the plan that followed before anything was scored again; NULL when none did"),
        ("policy", "of that plan"),
        ("given_up", "whether that plan evicts the block, or a part of it"),
    ),
    """
    WITH marked AS (
        SELECT *, min(CASE WHEN op = 'plan' THEN seq END) OVER later AS next_plan,
            min(CASE WHEN op = 'score' THEN seq END) OVER later AS next_score
        FROM events WHERE op = 'plan' OR op = 'score' AND reason IS DISTINCT FROM 'dense'
        WINDOW later AS (PARTITION BY run_id, session_id ORDER BY seq
            ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)),
    measured AS (
        SELECT run_id, session_id, seq, turn, reason AS kind, detail,
            CASE WHEN next_score IS NULL OR next_plan < next_score THEN next_plan END AS plan_seq
        FROM marked WHERE op = 'score'),
    given_up AS (
        SELECT DISTINCT run_id, session_id, seq AS plan_seq, ref[1] AS block_id
        FROM (SELECT run_id, session_id, seq, unnest(from_json(evict, '[["UBIGINT"]]')) AS ref FROM plans)),
    summed AS (
        SELECT *, list_sum(mass)::DOUBLE AS total FROM scores)
    SELECT s.run_id, s.session_id, s.seq, m.turn, m.kind, m.detail->>'layers' AS layers,
        (m.detail->>'queries')::UBIGINT AS queries, s.block_id, s."start", s."stop", s.total AS mass,
        s.total / (s."stop" - s."start") AS mass_per_token,
        rank() OVER (PARTITION BY s.run_id, s.session_id, s.seq ORDER BY s.total / (s."stop" - s."start") DESC)
            ::UBIGINT AS rank,
        m.plan_seq, p.policy,
        CASE WHEN m.plan_seq IS NOT NULL THEN g.block_id IS NOT NULL END AS given_up
    FROM summed s JOIN measured m USING (run_id, session_id, seq)
    LEFT JOIN plans p ON p.run_id = s.run_id AND p.session_id = s.session_id AND p.seq = m.plan_seq
    LEFT JOIN given_up g ON g.run_id = s.run_id AND g.session_id = s.session_id AND g.plan_seq = m.plan_seq
        AND g.block_id = s.block_id
    """,
    "SELECT session_id, plan_seq, block_id, rank, mass_per_token FROM scored WHERE given_up ORDER BY ALL",
)

ATTENTION = View(
    "attention",
    "One row per piece of queries and block of keys that a dense pass measured (`record --score-all`): what those "
    "queries pay to the block where nothing is ever evicted. `share` is of all that the piece pays, over all layers "
    "and heads; a block that the piece itself stands in counts as far as the piece reaches.",
    (
        *ROW,
        ("seq", "the score event of the piece"),
        ("turn", "the turn"),
        ("query_start", "first tape position of the queries"),
        ("query_stop", "one past the last"),
        ("repeated", "whether they were measured again, and not computed by the session then"),
        ("block_id", "the block"),
        ("start", "first tape position"),
        ("stop", "one past the last"),
        ("mass", "attention summed over layers, heads, queries and the block's tokens"),
        ("share", "the same / the sum over all blocks"),
    ),
    """
    SELECT s.run_id, s.session_id, s.seq, e.turn, e."start" AS query_start, e."stop" AS query_stop,
        coalesce((e.detail->>'repeated')::BOOLEAN, false) AS repeated, s.block_id, s."start", s."stop",
        list_sum(s.mass)::DOUBLE AS mass,
        list_sum(s.mass)::DOUBLE / sum(list_sum(s.mass)::DOUBLE) OVER (PARTITION BY s.run_id, s.session_id, s.seq)
            AS share
    FROM scores s JOIN events e USING (run_id, session_id, seq) WHERE e.op = 'score' AND e.reason = 'dense'
    """,
    "SELECT session_id, block_id, sum(share) AS of_all FROM attention WHERE NOT repeated GROUP BY ALL ORDER BY ALL",
)
