package reply

import "sync"

// A Checker says whether replies can be parsed, and what they say, without an allocation
// for each. The zero Checker is ready for use, by any number of goroutines.
type Checker struct {
	pool sync.Pool // of *Reply
}

// Check returns the response code of a reply, with the bits of it that OPT has, and
// whether it says that there is nothing: NXDOMAIN, or NOERROR without what the question
// asks for. The error is that of [Parse].
func (c *Checker) Check(msg []byte) (rcode int, negative bool, err error) {
	r, ok := c.pool.Get().(*Reply)
	if !ok {
		r = new(Reply)
	}
	parsed, err := parseInto(r, msg)
	if err == nil {
		rcode, negative = parsed.Rcode(), parsed.negative
	}
	*r = Reply{records: r.records[:0], extended: r.extended[:0]}
	c.pool.Put(r)
	return rcode, negative, err
}
