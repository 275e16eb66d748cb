"""Views inside every log, so that any DuckDB client sees them. Names and columns are public interface.

They are SQL over the rows alone. Where a view and the residency fold speak of one thing, the fold is what counts; a
test compares them on random sessions.
"""

from __future__ import annotations

from kvtape.traces.score_views import ATTENTION, SCORED
from kvtape.traces.view import ROW, View

__all__ = ["VIEWS"]


_TURNS = View(
    "turns",
    "One row per turn: what was offered, what was reused, what it cost. What an imported session's source does not say "
    "is NULL: a session without any event of an engine did not evict 0 tokens.",
    (
        *ROW,
        ("turn", "1-based"),
        ("first_seq", "its first event"),
        ("last_seq", "its last event"),
        ("prefix_tokens", "length of the prefix asked for: reused + forgotten + prefilled"),
        ("prompt_tokens", "tokens offered, prefix and suffixes"),
        ("reused", "resident tokens below the common prefix"),
        ("forgotten", "evicted tokens below the common prefix that were not put back"),
        ("prefilled", "prefix tokens past the common prefix"),
        ("dropped", "resident tokens given up by the truncation"),
        ("suffix", "suffix tokens"),
        ("completion_tokens", "tokens generated"),
        ("drafted_tokens", "proposed tokens that the engine looked at; NULL without speculation"),
        ("accepted_tokens", "of those, the ones that it generates itself"),
        ("physical_prefill_tokens", "tokens the engine computed for prefills and rebuilds"),
        ("deferred_prefill_calls", "prefills that waited and were computed by a decode"),
        ("deferred_prefill_tokens", "their tokens"),
        ("recomputed_tokens", "tokens computed again that had been resident"),
        ("evicted_tokens", "tokens evicted during the turn"),
        ("admitted_tokens", "tokens put back from the cold store"),
        ("refused", "operations refused"),
        ("prefill_ns", "nanoseconds in prefill"),
        ("decode_ns", "nanoseconds in decode"),
        ("resident_tokens", "tokens resident at the end of the turn"),
    ),
    """
    SELECT run_id, session_id, turn, min(seq) AS first_seq, max(seq) AS last_seq,
        max(n_tokens) FILTER (op = 'prompt' AND reason IS DISTINCT FROM 'suffix') AS prefix_tokens,
        coalesce(sum(prompt_tokens), 0)::UBIGINT AS prompt_tokens,
        sum(reused)::UBIGINT AS reused,
        sum(forgotten)::UBIGINT AS forgotten,
        sum(prefilled)::UBIGINT AS prefilled,
        sum(dropped)::UBIGINT AS dropped,
        coalesce(sum(suffix), 0)::UBIGINT AS suffix,
        coalesce(sum(completion_tokens), 0)::UBIGINT AS completion_tokens,
        sum(drafted_tokens)::UBIGINT AS drafted_tokens,
        sum(accepted_tokens)::UBIGINT AS accepted_tokens,
        coalesce(sum(physical_prefill_tokens), nothing)::UBIGINT AS physical_prefill_tokens,
        coalesce(sum(deferred_prefill_calls), nothing)::UBIGINT AS deferred_prefill_calls,
        coalesce(sum(deferred_prefill_tokens), nothing)::UBIGINT AS deferred_prefill_tokens,
        coalesce(sum(recomputed_tokens), nothing)::UBIGINT AS recomputed_tokens,
        coalesce(sum(n_tokens) FILTER (op = 'evict'), nothing)::UBIGINT AS evicted_tokens,
        coalesce(sum(n_tokens) FILTER (op = 'admit'), nothing)::UBIGINT AS admitted_tokens,
        count(*) FILTER (op = 'refuse')::UBIGINT AS refused,
        coalesce(sum(elapsed_ns) FILTER (op = 'prefill'), nothing)::UBIGINT AS prefill_ns,
        coalesce(sum(elapsed_ns) FILTER (op = 'decode'), nothing)::UBIGINT AS decode_ns,
        arg_max(resident_tokens, seq) FILTER (resident_tokens IS NOT NULL) AS resident_tokens
    FROM (
        SELECT *, CASE WHEN bool_or(op NOT IN ('open', 'prompt', 'generate', 'close'))
            OVER (PARTITION BY run_id, session_id) THEN 0 END AS nothing
        FROM events)
    WHERE turn > 0 GROUP BY run_id, session_id, turn, nothing
    """,
    "SELECT session_id, turn, prompt_tokens, reused, forgotten, prefilled FROM turns ORDER BY ALL",
)

_COLD_BLOCKS = View(
    "cold_blocks",
    "One row per stay of a block in the cold store.",
    (
        *ROW,
        ("block_id", "the block"),
        ("start", "first tape position"),
        ("stop", "one past the last"),
        ("cold_from_seq", "the evict that moved it there"),
        ("cold_until_seq", "the admit, trim, truncate or restore that ended the stay; NULL while it lasts"),
    ),
    """
    WITH stays AS (
        SELECT run_id, session_id, seq AS cold_from_seq, ref[1] AS block_id, ref[2] AS "start", ref[3] AS "stop"
        FROM (SELECT run_id, session_id, seq, unnest(from_json(blocks, '[["UBIGINT"]]')) AS ref
              FROM events WHERE op = 'evict' AND cold AND blocks IS NOT NULL)),
    left_by AS (
        SELECT s.*, min(e.seq) AS left_seq
        FROM stays s LEFT JOIN events e ON e.run_id = s.run_id AND e.session_id = s.session_id
            AND e.seq > s.cold_from_seq AND e.op IN ('admit', 'trim', 'truncate')
            AND (e.op = 'truncate' AND e."start" < s."stop" OR e.op <> 'truncate' AND e.block_id = s.block_id)
        GROUP BY ALL),
    restores AS (
        SELECT r.run_id, r.session_id, r.seq AS restore_seq, max(s.seq) AS snapshot_seq
        FROM events r JOIN events s ON s.run_id = r.run_id AND s.session_id = r.session_id
            AND r.op = 'restore' AND s.op = 'snapshot' AND s.snapshot_id = r.snapshot_id AND s.seq < r.seq
        GROUP BY ALL),
    undone AS (
        SELECT c.run_id, c.session_id, c.cold_from_seq, c.block_id, min(r.restore_seq) AS undone_seq
        FROM left_by c JOIN restores r ON r.run_id = c.run_id AND r.session_id = c.session_id
            AND r.restore_seq > c.cold_from_seq
        WHERE NOT EXISTS (
            SELECT 1 FROM left_by o WHERE o.run_id = c.run_id AND o.session_id = c.session_id
                AND o.block_id = c.block_id AND o.cold_from_seq < r.snapshot_seq
                AND (o.left_seq IS NULL OR o.left_seq > r.snapshot_seq))
        GROUP BY ALL)
    SELECT c.run_id, c.session_id, c.block_id, c."start", c."stop", c.cold_from_seq,
        least(c.left_seq, u.undone_seq) AS cold_until_seq
    FROM left_by c LEFT JOIN undone u ON u.run_id = c.run_id AND u.session_id = c.session_id
        AND u.cold_from_seq = c.cold_from_seq AND u.block_id = c.block_id
    """,
    "SELECT session_id, block_id, start, stop, cold_until_seq - cold_from_seq AS away FROM cold_blocks ORDER BY ALL",
)

_RESIDENCY = View(
    "residency",
    "One row per event: how many tokens were resident and cold after it.",
    (
        *ROW,
        ("seq", "the event"),
        ("op", "what happened"),
        ("turn", "the turn"),
        ("generation", "tape generation after the event"),
        ("start", "first tape position of the event"),
        ("stop", "one past the last"),
        ("way", "how it was carried out"),
        ("resident_tokens", "resident after the event, as last recorded"),
        ("resident_digest", "digest of the resident tape ranges, as last recorded"),
        ("cold_tokens", "in the cold store after the event"),
        ("kv_bytes", "bytes of the resident rows, as last recorded"),
    ),
    """
    WITH changes AS (
        SELECT run_id, session_id, cold_from_seq AS seq, ("stop" - "start")::HUGEINT AS tokens FROM cold_blocks
        UNION ALL
        SELECT run_id, session_id, cold_until_seq, -("stop" - "start")::HUGEINT FROM cold_blocks
        WHERE cold_until_seq IS NOT NULL),
    per_event AS (
        SELECT run_id, session_id, seq, sum(tokens) AS tokens FROM changes GROUP BY ALL)
    SELECT e.run_id, e.session_id, e.seq, e.op, e.turn, e.generation, e."start", e."stop", e.way,
        coalesce(last_value(e.resident_tokens IGNORE NULLS) OVER so_far, 0)::UBIGINT AS resident_tokens,
        last_value(e.resident_digest IGNORE NULLS) OVER so_far AS resident_digest,
        coalesce(sum(c.tokens) OVER so_far, 0)::UBIGINT AS cold_tokens,
        last_value(e.kv_bytes IGNORE NULLS) OVER so_far AS kv_bytes
    FROM events e LEFT JOIN per_event c USING (run_id, session_id, seq)
    WINDOW so_far AS (PARTITION BY e.run_id, e.session_id ORDER BY e.seq)
    """,
    "SELECT session_id, seq, op, resident_tokens, cold_tokens FROM residency WHERE op = 'evict' ORDER BY ALL",
)

_REUSE = View(
    "reuse",
    "How much of each turn's prefix was reused. Weighted by tokens; the first turn counts like any other.",
    (
        *ROW,
        ("turn", "the turn"),
        ("prefix_tokens", "tokens of the prefix asked for"),
        ("reused", "of them resident"),
        ("forgotten", "of them evicted and not put back"),
        ("prefilled", "of them computed"),
        ("reused_share", "reused / prefix_tokens"),
        ("session_reused_share", "the same over this turn and all before it"),
    ),
    """
    SELECT run_id, session_id, turn, prefix_tokens, reused, forgotten, prefilled,
        reused / prefix_tokens AS reused_share,
        sum(reused) OVER so_far / sum(prefix_tokens) OVER so_far AS session_reused_share
    FROM turns WHERE prefix_tokens > 0 AND reused IS NOT NULL
    WINDOW so_far AS (PARTITION BY run_id, session_id ORDER BY turn)
    """,
    "SELECT session_id, turn, reused_share, session_reused_share FROM reuse ORDER BY ALL",
)

_WHY_PREFILLED = View(
    "why_prefilled",
    "One row per event in which the engine computed prompt tokens, and the reason. Reasons: `cold` (nothing had been "
    "computed in the session), `extended` (the prompt goes on past the tape), `diverged` (the tape held other tokens "
    "there), `evicted` (the tokens had been resident and were computed again), `last_token_for_logits` (the whole "
    "prompt was there, its last token was computed for its logits), `restore_had_no_effect` (a state was restored and "
    "nothing of the common prefix was resident), `window_pruned` (a sliding window had dropped what it needs; imported "
    "server logs say so), `suffix` (tokens put behind the prefix; of a piece with both the first token counts), "
    "`shift_impossible` and "
    "`surgery_impossible` (the cache was rebuilt because the session can neither move nor take out rows), "
    "`rebuild_chosen` (it was rebuilt although it could), `unknown` (the events before it were lost).",
    (
        *ROW,
        ("seq", "the event"),
        ("turn", "the turn"),
        ("op", "prefill, recompute, evict or truncate"),
        ("start", "first tape position of the event"),
        ("stop", "one past the last"),
        ("tokens", "tokens the engine computed for it"),
        ("replaced_tokens", "prefill: of its positions, those the tape had before the cut"),
        ("reason", "see above"),
        ("elapsed_ns", "nanoseconds"),
    ),
    """
    WITH marked AS (
        SELECT *,
            max(CASE WHEN op = 'prompt' THEN seq END) OVER so_far AS last_prompt,
            last_value(CASE WHEN op = 'prompt' THEN "start" END IGNORE NULLS) OVER so_far AS last_start,
            max(CASE WHEN op = 'prompt' AND reason IS DISTINCT FROM 'suffix' THEN seq END) OVER so_far AS prefix_seq,
            max(CASE WHEN op = 'truncate' THEN seq END) OVER so_far AS cut_seq,
            max(CASE WHEN op = 'restore' THEN seq END) OVER so_far AS restore_seq,
            max(CASE WHEN op IN ('prefill', 'decode') THEN seq END) OVER so_far AS computed_seq
        FROM events WINDOW so_far AS (PARTITION BY run_id, session_id ORDER BY seq)),
    waited AS (
        SELECT c.run_id, c.session_id, c.seq, max(q.seq) AS prompt_seq
        FROM marked c JOIN marked q ON q.run_id = c.run_id AND q.session_id = c.session_id AND q.op = 'prompt'
            AND q.seq >= c.prefix_seq AND q.seq < c.seq AND (q.seq = c.prefix_seq OR q."start" <= c."start")
        WHERE c.op = 'prefill' AND c.last_start > c."start" GROUP BY ALL),
    asked AS (
        SELECT m.*, coalesce(w.prompt_seq, m.last_prompt) AS prompt_seq
        FROM marked m LEFT JOIN waited w USING (run_id, session_id, seq)),
    computed AS (
        SELECT a.*, max(reused) OVER (PARTITION BY run_id, session_id, prefix_seq) AS turn_reused FROM asked a)
    SELECT c.run_id, c.session_id, c.seq, c.turn, c.op, c."start", c."stop",
        coalesce(c.physical_prefill_tokens, c.n_tokens) AS tokens,
        CASE WHEN c.op = 'prefill'
             THEN greatest(0, least(c."stop", coalesce(cut."stop", 0))::HUGEINT - c."start")::UBIGINT
             END AS replaced_tokens,
        CASE
            WHEN c.op = 'recompute' THEN 'evicted'
            WHEN c.op IN ('evict', 'truncate') AND s.policy LIKE '%positions=rebased%'
                AND NOT (s.capabilities->>'position_shift')::BOOLEAN THEN 'shift_impossible'
            WHEN c.op IN ('evict', 'truncate') AND NOT (s.capabilities->>'remove_middle')::BOOLEAN
                THEN 'surgery_impossible'
            WHEN c.op IN ('evict', 'truncate') THEN 'rebuild_chosen'
            WHEN p.seq IS NULL THEN 'unknown'
            WHEN p.reason = 'suffix' THEN 'suffix'
            WHEN cut.reason = 'window_pruned' THEN 'window_pruned'
            WHEN p.computed_seq IS NULL THEN 'cold'
            WHEN p.restore_seq > p.computed_seq AND p."start" > 0 AND c.turn_reused = 0 THEN 'restore_had_no_effect'
            WHEN c."start" >= cut."stop" THEN 'extended'
            WHEN cut.reason = 'hole' THEN 'evicted'
            WHEN cut.reason = 'logits' THEN 'last_token_for_logits'
            WHEN cut.seq IS NOT NULL THEN 'diverged'
            ELSE 'extended'
        END AS reason,
        c.elapsed_ns
    FROM computed c
    LEFT JOIN sessions s ON s.run_id = c.run_id AND s.session_id = c.session_id
    LEFT JOIN marked p ON p.run_id = c.run_id AND p.session_id = c.session_id AND p.seq = c.prompt_seq
    LEFT JOIN events cut ON cut.run_id = c.run_id AND cut.session_id = c.session_id AND cut.seq = c.cut_seq
        AND c.cut_seq > c.prompt_seq
    WHERE c.op IN ('prefill', 'recompute') AND c.reason IS DISTINCT FROM 'before_log'
        OR c.op IN ('evict', 'truncate') AND c.way = 'recompute'
    """,
    "SELECT reason, count(*) AS events, sum(tokens) AS tokens FROM why_prefilled GROUP BY reason ORDER BY tokens DESC",
)

_COSTS = View(
    "costs",
    "What operations took, by op and way. Refused and fatal operations are not in it.",
    (
        ("run_id", "the run"),
        ("backend", "the engine"),
        ("op", "the operation"),
        ("way", "how it was carried out"),
        ("events", "how many"),
        ("tokens", "tokens they were about"),
        ("computed_tokens", "tokens the engine computed in prefills and rebuilds"),
        ("elapsed_ns", "nanoseconds in all"),
        ("avg_elapsed_ns", "nanoseconds of one"),
        ("ns_per_token", "elapsed_ns / tokens"),
        ("drafted_tokens", "decode: proposed tokens that the engine looked at; NULL without speculation"),
        ("accepted_share", "of those, the share that it generates itself"),
    ),
    """
    SELECT e.run_id, s.backend, e.op, e.way, count(*)::UBIGINT AS events, sum(e.n_tokens)::UBIGINT AS tokens,
        sum(e.physical_prefill_tokens)::UBIGINT AS computed_tokens, sum(e.elapsed_ns)::UBIGINT AS elapsed_ns,
        avg(e.elapsed_ns) AS avg_elapsed_ns, sum(e.elapsed_ns) / nullif(sum(e.n_tokens), 0) AS ns_per_token,
        sum(e.drafted_tokens)::UBIGINT AS drafted_tokens,
        sum(e.accepted_tokens) / nullif(sum(e.drafted_tokens), 0) AS accepted_share
    FROM events e LEFT JOIN sessions s USING (run_id, session_id)
    WHERE e.elapsed_ns IS NOT NULL AND e.op NOT IN ('refuse', 'fatal') GROUP BY ALL
    """,
    "SELECT op, way, events, tokens, round(ns_per_token / 1e6, 3) AS ms_per_token FROM costs ORDER BY op, way",
)

_FATALS = View(
    "fatals",
    "Sessions that ended in a fatal error: the first cause and what came before it.",
    (
        *ROW,
        ("seq", "the fatal event"),
        ("turn", "the turn"),
        ("at_ns", "when, on the session's clock"),
        ("error_class", "allocator_exhausted, prefill_failed, decode_failed, ..."),
        ("reason", "the first cause"),
        ("previous_op", "the event before it"),
        ("resident_tokens", "tokens resident before it"),
    ),
    """
    WITH placed AS (
        SELECT *, lag(op) OVER so_far AS previous_op,
            last_value(resident_tokens IGNORE NULLS) OVER so_far AS resident_before
        FROM events WINDOW so_far AS (PARTITION BY run_id, session_id ORDER BY seq))
    SELECT run_id, session_id, seq, turn, at_ns, error_class, reason, previous_op, resident_before AS resident_tokens
    FROM placed WHERE op = 'fatal'
    """,
    "SELECT session_id, error_class, reason, previous_op FROM fatals",
)

_DECISIONS = View(
    "decisions",
    "One row per plan with the evicts it caused: those it planned, up to the session's next plan.",
    (
        *ROW,
        ("seq", "the plan event"),
        ("turn", "the turn"),
        ("policy", "policy spec"),
        ("trigger", "what passed which limit"),
        ("limit_tokens", "that limit"),
        ("incoming_tokens", "tokens about to be computed"),
        ("budget_tokens", "tokens the plan may keep"),
        ("total_tokens", "resident before"),
        ("hot_tokens", "kept"),
        ("over_budget", "whether what is kept exceeds the budget"),
        ("planned_evict_tokens", "tokens the plan gives up"),
        ("evicts", "evict events that carried it out"),
        ("evicted_tokens", "tokens they removed"),
        ("cold_evicts", "of those events, the ones that kept the rows in the cold store"),
        ("evict_ns", "nanoseconds they took"),
    ),
    """
    WITH placed AS (
        SELECT *, max(CASE WHEN op = 'plan' THEN seq END)
            OVER (PARTITION BY run_id, session_id ORDER BY seq) AS plan_seq
        FROM events),
    done AS (
        SELECT run_id, session_id, plan_seq AS seq, count(*) AS evicts, sum(n_tokens) AS tokens,
            count(*) FILTER (cold) AS cold_evicts, sum(elapsed_ns) AS elapsed_ns
        FROM placed WHERE op = 'evict' AND reason LIKE 'plan:%' GROUP BY ALL)
    SELECT p.run_id, p.session_id, p.seq, e.turn, p.policy, p."trigger", p.limit_tokens, p.incoming_tokens,
        p.budget_tokens, p.total_tokens, p.hot_tokens, p.over_budget,
        p.total_tokens - p.hot_tokens AS planned_evict_tokens,
        coalesce(d.evicts, 0)::UBIGINT AS evicts, coalesce(d.tokens, 0)::UBIGINT AS evicted_tokens,
        coalesce(d.cold_evicts, 0)::UBIGINT AS cold_evicts, d.elapsed_ns::UBIGINT AS evict_ns
    FROM plans p JOIN events e USING (run_id, session_id, seq) LEFT JOIN done d USING (run_id, session_id, seq)
    """,
    'SELECT session_id, seq, "trigger", total_tokens, hot_tokens, evicts FROM decisions ORDER BY ALL',
)

_WARM_COLD = View(
    "warm_cold",
    "One row per turn: how much of its context was there already and how much had to be computed, the work that a "
    "kernel for sparse prefill could save. `attention_pairs` counts the query-key pairs of dense causal attention of "
    "the computed tokens: computed x warm + computed x (computed + 1) / 2. `rule` says where warm comes from: "
    "`measured` (the engine reused it), or `endless_cache` (the source only has block ids: the leading blocks that an "
    "earlier request of the run had, what a cache of any size could have had); NULL where nothing is known.",
    (
        *ROW,
        ("turn", "the turn"),
        ("kind", "warm (some of the context was there), cold (none), or NULL"),
        ("rule", "see above"),
        ("context_tokens", "tokens of the prompt, and those put behind it"),
        ("warm_tokens", "of them already there"),
        ("computed_tokens", "of them computed"),
        ("attention_pairs", "see above"),
    ),
    """
    WITH ids AS (
        SELECT t.run_id, t.session_id, e.turn, t.n_tokens, t.block_tokens, e.at_ns, e.session_id AS of, e.seq,
            unnest(from_json(t.hashes, '["VARCHAR"]')) AS block, generate_subscripts(
                from_json(t.hashes, '["VARCHAR"]'), 1) AS number
        FROM tokens t JOIN events e USING (run_id, session_id, seq) WHERE e.op = 'prompt'),
    firsts AS (
        SELECT *, (at_ns, of, seq) > min((at_ns, of, seq)) OVER (PARTITION BY run_id, block) AS seen FROM ids),
    endless AS (
        SELECT run_id, session_id, turn, least(any_value(n_tokens), any_value(block_tokens)
            * (coalesce(min(number) FILTER (NOT seen), max(number) + 1) - 1))::UBIGINT AS warm
        FROM firsts GROUP BY ALL),
    joined AS (
        SELECT t.run_id, t.session_id, t.turn, coalesce(t.prefix_tokens, 0) + t.suffix AS context_tokens,
            CASE WHEN t.reused IS NOT NULL THEN 'measured' WHEN w.warm IS NOT NULL THEN 'endless_cache' END AS rule,
            coalesce(t.reused + t.forgotten, t.reused, w.warm) AS warm_tokens
        FROM turns t LEFT JOIN endless w USING (run_id, session_id, turn)),
    counted AS (
        SELECT *, (context_tokens::HUGEINT - warm_tokens)::UBIGINT AS computed_tokens FROM joined)
    SELECT run_id, session_id, turn, CASE WHEN warm_tokens > 0 THEN 'warm' WHEN warm_tokens = 0 THEN 'cold' END AS kind,
        rule, context_tokens, warm_tokens, computed_tokens,
        computed_tokens * warm_tokens + computed_tokens * (computed_tokens + 1) // 2 AS attention_pairs
    FROM counted
    """,
    "SELECT kind, rule, count(*) AS turns, sum(computed_tokens) AS computed FROM warm_cold GROUP BY ALL ORDER BY ALL",
)

_CONTEXT_LENGTHS = View(
    "context_lengths",
    "One row per run and doubling of the context length: how many turns are so long, and how much of the run's "
    "attention work stands in them. Weighted by turns, by tokens and by query-key pairs (see `warm_cold`).",
    (
        ("run_id", "the run"),
        ("at_least_tokens", "contexts of this many tokens up to twice as many; a power of two, 0 for an empty one"),
        ("turns", "turns with such a context"),
        ("context_tokens", "their tokens"),
        ("computed_tokens", "those of them that were computed; NULL where that is not known"),
        ("attention_pairs", "query-key pairs of the computed ones; NULL where that is not known"),
        ("turns_share", "of the run's turns"),
        ("attention_share", "of the run's pairs"),
    ),
    """
    WITH grouped AS (
        SELECT run_id, CASE WHEN context_tokens > 0 THEN (2 ** floor(log2(context_tokens)))::UBIGINT
                ELSE 0 END AS at_least_tokens,
            count(*)::UBIGINT AS turns, sum(context_tokens)::UBIGINT AS context_tokens,
            sum(computed_tokens)::UBIGINT AS computed_tokens, sum(attention_pairs)::UBIGINT AS attention_pairs
        FROM warm_cold GROUP BY ALL)
    SELECT *, turns / sum(turns) OVER (PARTITION BY run_id) AS turns_share,
        attention_pairs / nullif(sum(attention_pairs) OVER (PARTITION BY run_id), 0) AS attention_share
    FROM grouped
    """,
    "SELECT at_least_tokens, turns, round(attention_share, 3) AS attention FROM context_lengths ORDER BY ALL",
)

VIEWS: tuple[View, ...] = (
    _TURNS,
    _COLD_BLOCKS,
    _RESIDENCY,
    _REUSE,
    _WHY_PREFILLED,
    _COSTS,
    _FATALS,
    _DECISIONS,
    SCORED,
    ATTENTION,
    _WARM_COLD,
    _CONTEXT_LENGTHS,
)
"""In the order of creation: a view may use the ones before it."""
