package seen

import (
	"bytes"
	"net/netip"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Kind says whether a query is noteworthy.
type Kind uint8

// The kinds of queries.
const (
	Ordinary Kind = iota
	// Failure: a response code that is no answer (neither NOERROR nor NXDOMAIN), or a stale answer.
	Failure
	// Odd: at least as slow as [Slow], truncated over TCP, or for the name of a Service that does not exist or has no address.
	Odd
	kinds
)

// noteworthy reports whether a query of the kind is noteworthy by itself.
func (k Kind) noteworthy() bool { return k == Failure || k == Odd }

// Slow is how long a query must take to be noteworthy because it is slow.
const Slow = 500 * time.Millisecond

// Dropped stands for the response code of a query that got no response, because too many queries were waiting.
const Dropped = 0xffff

// A Moment is a time since the start of a [Recorder]. It is 0 if the clock was not read.
type Moment time.Duration

// A Query is a query that was answered. [Recorder.Record] copies its name, so the memory of the packet may be used again.
type Query struct {
	id        uint64        // set by Recorder.Record
	Kind      Kind          //
	Time      time.Time     // when it was answered
	Took      time.Duration // negative if it was not measured
	Client    netip.AddrPort
	TCP       bool
	Opcode    uint8
	Name      wire.Name
	Type      uint16
	Class     uint16
	Rcode     uint16
	Truncated bool
	Denied    bool          // the policy of the guard denies the name; in an audit, it is answered all the same
	Source    string        // where the answer comes from, as in metrics
	Server    string        // the nameserver that sent the reply
	Rows      []string      // the rows of docs/behaviour.md that apply
	Reason    string        // why there is no answer, or a stale one
	Age       time.Duration // how long the reply was in the cache; 0 if it does not come from the cache
	Expired   time.Duration // how long ago a stale reply has expired
	Who       Who

	// These fields are for readers of messages only, and are not kept otherwise.
	Local    func() netip.AddrPort // the address of the agent
	Request  []byte                // the messages, valid until Record returns
	Response []byte                // empty if there was no response
}

// Who is the owner of a client's socket.
type Who struct {
	Known   bool   // whether the owner was found
	skipped bool   // the owner was not looked up, because lookups take too much time
	UID     uint32 // the number of the user
	Cgroup  uint64 // the inode of the cgroup's directory; 0 if it is unknown
}

// maxReason bounds the reason of a query that is kept, in bytes: nameservers choose parts of it.
const maxReason = 255

// kept returns a copy of q that may be kept: its name does not point to the packet, its reason is bounded, and it has no
// messages.
func (q *Query) kept() *Query {
	k := *q
	k.Name, k.Time = wire.Name(strings.Clone(string(q.Name))), q.Time.Round(0) // without the monotonic clock
	k.Local, k.Request, k.Response = nil, nil, nil
	if len(k.Reason) > maxReason {
		k.Reason = q.Reason[:maxReason] + "..."
	}
	return &k
}

// withMessages returns a copy of kept, which is the kept copy of q, with copies of the messages.
func (q *Query) withMessages(kept *Query) *Query {
	whole, local := *kept, q.Local()
	whole.Local = func() netip.AddrPort { return local }
	whole.Request, whole.Response = bytes.Clone(q.Request), bytes.Clone(q.Response)
	return &whole
}

// size returns the length of the messages.
func (q *Query) size() int64 { return int64(len(q.Request) + len(q.Response)) }

// messages returns how many messages a query with this response has.
func messages(response []byte) int {
	if len(response) == 0 {
		return 1
	}
	return 2
}
