package upstream

import (
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A reading is what a schedule needs to know about a reply.
type reading struct {
	code      int   // the response code, with the bits of it that an OPT record has
	negative  bool  // NXDOMAIN, or NOERROR without an answer
	truncated bool  // then it is not negative
	other     bool  // the opcode is not QUERY; then any response code is an answer
	err       error // why the reply cannot be used
}

// usable reports whether the reply is an answer and not a server's failure to give one.
func (r reading) usable() bool {
	return r.err == nil && (r.other || r.code == dns.RcodeSuccess || r.code == dns.RcodeNameError)
}

// rejectsEDNS reports whether the server may not support EDNS, or its version 0
// (RFC 6891, sections 6.1.3 and 7).
func (r reading) rejectsEDNS() bool {
	return r.code == dns.RcodeFormatError || r.code == dns.RcodeNotImplemented || r.code == dns.RcodeBadVers
}

// read reads a reply.
func (c *Client) read(reply []byte) (r reading) {
	r.code, r.truncated = rcode(reply), truncated(reply)
	switch {
	case !isQuery(reply):
		r.other = true
		return r
	case c.config.Check == nil:
		r.negative = r.code == dns.RcodeNameError || r.code == dns.RcodeSuccess && wire.Count(reply, wire.AnswerSection) == 0
	default:
		r.code, r.negative, r.err = c.config.Check(reply)
	}
	r.negative = r.negative && !r.truncated
	return r
}
