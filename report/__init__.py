"""The report: one self-contained HTML page of a log. `write.write_report` makes it; `panel` says what it is made of.

traces, sim, eval ...  rows of the log, files of results
        |
sources                what is shown: runs, sessions, results, each session's history
        |
data                   numbers, and how they were aggregated      (pure, tested beside the fold)
figures                panels: sentences, figures, tables, and what is missing
        |
page, markup, packing  HTML: the only place where texts become markup
assets                 styles and the script: draws, zooms, points; counts cells again from exact rectangles
"""
