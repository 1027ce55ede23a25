package upstream

import "encoding/binary"

// A reading is what a reply says, as far as it matters to who asks.
type reading struct {
	code     int   // the response code, with the bits of it that an OPT record has
	negative bool  // NXDOMAIN, or NOERROR without an answer
	other    bool  // to an opcode other than QUERY: any response code is an answer
	err      error // why the reply cannot be read; it is no answer then
}

// usable reports whether the reply is an answer and not a server's failure to give one.
func (r reading) usable() bool {
	return r.err == nil && (r.other || r.code == rcodeSuccess || r.code == rcodeName)
}

// read reads a reply.
func (c *Client) read(reply []byte) (r reading) {
	r.code = rcode(reply)
	r.negative = r.code == rcodeName || r.code == rcodeSuccess && binary.BigEndian.Uint16(reply[6:]) == 0
	r.other = !isQuery(reply)
	return r
}
