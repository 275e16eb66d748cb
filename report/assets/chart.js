// Charts of series over two axes.
