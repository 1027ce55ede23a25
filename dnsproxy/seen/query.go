package seen

import (
	"encoding/binary"
	"net/netip"
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
	// Odd: at least as slow as [Slow], truncated over TCP, or NXDOMAIN for the name of a Service.
	Odd
	kinds
)

// noteworthy reports whether a query of the kind is noteworthy.
func (k Kind) noteworthy() bool { return k != Ordinary }

// Slow is how long a query must take to be noteworthy because it is slow.
const Slow = 500 * time.Millisecond

// Dropped stands for the response code of a query that got no response, because too many queries were waiting.
const Dropped = 0xffff

// A Moment is a time since the start of a [Recorder]. It is 0 if the clock was not read.
type Moment time.Duration

// A Query is a query that was answered. [Recorder.Record] copies its texts, so their memory may be used again.
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
	Source    string        // where the answer comes from, as in metrics
	Server    string        // the nameserver that sent the reply
	Rows      []string      // the rows of docs/behaviour.md that apply
	Reason    string        // why there is no answer, or a stale one
	Age       time.Duration // how long the reply was in the cache; 0 if it does not come from the cache
	Expired   time.Duration // how long ago a stale reply has expired
	Who       Who

	// These fields are only for [Exchanges], and are not kept in a ring.
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

const (
	slotSize = 512 // the size of a packed query, in bytes
	headSize = 72  // the size of its part before the texts

	// The longest texts, in bytes.
	maxServer = 80
	maxRows   = 32
	maxSource = 20
	maxText   = 255 // of Reason, which is cut shorter if the slot is full
)

const (
	flagTCP = 1 << iota
	flagTruncated
	flagKnown
)

// pack writes q into b and returns its length. Long texts are cut.
func (q *Query) pack(b *[slotSize]byte) int {
	order := binary.LittleEndian
	order.PutUint64(b[0:], q.id)
	order.PutUint64(b[8:], uint64(q.Time.UnixNano())) //nolint:gosec // bits
	order.PutUint64(b[16:], uint64(q.Took))           //nolint:gosec // bits
	addr := q.Client.Addr().As16()
	copy(b[24:], addr[:])
	order.PutUint16(b[40:], q.Client.Port())
	b[42] = flag(q.TCP, flagTCP) | flag(q.Truncated, flagTruncated) | flag(q.Who.Known, flagKnown)
	b[43] = byte(q.Kind)
	order.PutUint16(b[44:], q.Type)
	order.PutUint16(b[46:], q.Class)
	order.PutUint16(b[48:], q.Rcode)
	b[50] = q.Opcode
	order.PutUint32(b[52:], q.Who.UID)
	order.PutUint64(b[56:], q.Who.Cgroup)
	order.PutUint32(b[64:], uint32(min(max(q.Age, 0)/time.Second, 1<<31)))     //nolint:gosec // bounded
	order.PutUint32(b[68:], uint32(min(max(q.Expired, 0)/time.Second, 1<<31))) //nolint:gosec // bounded
	n := headSize
	n = packText(b, n, string(q.Name), wire.MaxNameLen)
	n = packText(b, n, q.Source, maxSource)
	n = packText(b, n, q.Server, maxServer)
	start := n
	n++
	for i, row := range q.Rows {
		if n-start+len(row)+1 > maxRows {
			break
		}
		if i > 0 {
			b[n] = ' '
			n++
		}
		n += copy(b[n:], row)
	}
	b[start] = byte(n - start - 1) //nolint:gosec // at most maxRows
	return packText(b, n, q.Reason, maxText)
}

func flag(set bool, bit byte) byte {
	if set {
		return bit
	}
	return 0
}

// cut replaces the end of a text that was too long.
const cut = "..."

// packText writes the length of a text, and then the text, to b at the offset n. It cuts the text to limit bytes. It
// returns the offset after the text.
func packText(b *[slotSize]byte, n int, text string, limit int) int {
	limit = min(limit, slotSize-n-1)
	length := copy(b[n+1:n+1+limit], text)
	if length < len(text) {
		copy(b[n+1+length-len(cut):], cut)
	}
	b[n] = byte(length) //nolint:gosec // limit fits
	return n + 1 + length
}

// A packedQuery is a query in a slot.
type packedQuery [slotSize]byte

func (b *packedQuery) id() uint64 { return binary.LittleEndian.Uint64(b[0:]) }

func (b *packedQuery) time() time.Time {
	return time.Unix(0, int64(binary.LittleEndian.Uint64(b[8:]))) //nolint:gosec // bits
}

// texts returns the texts in this order: name, source, server, rows, reason.
func (b *packedQuery) texts() (texts [5]string) {
	rest := b[headSize:]
	for i := range texts {
		n := int(rest[0])
		texts[i], rest = string(rest[1:1+n]), rest[1+n:]
	}
	return texts
}
