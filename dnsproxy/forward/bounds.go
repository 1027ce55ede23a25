package forward

import "sync/atomic"

const (
	// shortQuery is the length in bytes up to which queries are bounded by their number
	// alone, as nearly all are.
	shortQuery = 1 << 10
	// maxLongQueries bounds the bytes of all longer queries that wait. A query is copied
	// about five times on its way to nameservers.
	maxLongQueries = 8 << 20
)

// A longQueries counts the bytes of long queries that wait. The zero value is ready for
// use.
type longQueries struct{ bytes atomic.Int64 }

// take counts a query of n bytes and reports true, unless long queries have too many bytes
// already. If it reports true, the caller must call release later.
func (l *longQueries) take(n int) bool {
	if n <= shortQuery {
		return true
	}
	if l.bytes.Add(int64(n)) > maxLongQueries {
		l.bytes.Add(-int64(n))
		return false
	}
	return true
}

// release subtracts a query that take has counted.
func (l *longQueries) release(n int) {
	if n > shortQuery {
		l.bytes.Add(-int64(n))
	}
}
