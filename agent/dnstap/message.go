package dnstap

import (
	"encoding/binary"
	"encoding/json"
	"net/netip"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// The fields of message Dnstap in dnstap.proto.
const (
	dnstapIdentity protowire.Number = 1
	dnstapVersion  protowire.Number = 2
	dnstapExtra    protowire.Number = 3
	dnstapMessage  protowire.Number = 14
	dnstapType     protowire.Number = 15

	typeMessage = 1
)

// The fields of message Message.
const (
	messageType            protowire.Number = 1
	messageFamily          protowire.Number = 2
	messageProtocol        protowire.Number = 3
	messageQueryAddress    protowire.Number = 4
	messageResponseAddress protowire.Number = 5
	messageQueryPort       protowire.Number = 6
	messageResponsePort    protowire.Number = 7
	messageQuerySeconds    protowire.Number = 8
	messageQueryNanos      protowire.Number = 9
	messageQuery           protowire.Number = 10
	messageResponseSeconds protowire.Number = 12
	messageResponseNanos   protowire.Number = 13
	messageResponse        protowire.Number = 14

	clientQuery    = 5
	clientResponse = 6
	familyIPv4     = 1
	familyIPv6     = 2
	protocolUDP    = 1
	protocolTCP    = 2
)

// A client is the content of the extra field of a CLIENT_QUERY. It has the JSON keys of [seen.Record].
type client struct {
	UID    *uint32 `json:"uid,omitempty"`
	Unit   string  `json:"unit,omitempty"`
	Cgroup string  `json:"cgroup,omitempty"`
}

// An answer is the content of the extra field of a CLIENT_RESPONSE. It has the JSON keys of [seen.Record].
type answer struct {
	client

	Source  string   `json:"source"`
	Server  string   `json:"server,omitempty"`
	Age     int      `json:"ageSeconds,omitempty"`
	Expired int      `json:"expiredSeconds,omitempty"`
	Reason  string   `json:"reason,omitempty"`
	Rows    []string `json:"rows,omitempty"`
}

// An encoder makes the frames of messages.
type encoder struct {
	identity, version string
	inner             []byte // reused memory for a Message
	outer             []byte // reused memory for a Dnstap
}

// append appends the frames of a query to b.
func (e *encoder) append(b []byte, x *seen.Record) []byte {
	from := client{UID: x.UID, Unit: x.Unit, Cgroup: x.Cgroup}
	b = e.frame(b, x, clientQuery, from)
	if x.Messages() == 1 {
		return b
	}
	return e.frame(b, x, clientResponse, answer{
		client: from, Source: x.Source, Server: x.Server, Age: x.Age, Expired: x.Expired, Reason: x.Reason, Rows: x.Rows,
	})
}

// frame appends a frame with one message.
func (e *encoder) frame(b []byte, x *seen.Record, kind uint64, extra any) []byte {
	e.inner = appendMessage(e.inner[:0], x, kind)
	out := appendBytes(e.outer[:0], dnstapIdentity, []byte(e.identity))
	out = appendBytes(out, dnstapVersion, []byte(e.version))
	if text, err := json.Marshal(extra); err == nil && len(text) > len("{}") {
		out = appendBytes(out, dnstapExtra, text)
	}
	out = appendBytes(out, dnstapMessage, e.inner)
	e.outer = appendVarint(out, dnstapType, typeMessage)
	b = binary.BigEndian.AppendUint32(b, uint32(len(e.outer))) //nolint:gosec // a message of at most 64 KiB, and short texts
	return append(b, e.outer...)
}

// appendMessage appends a Message of a kind.
func appendMessage(b []byte, x *seen.Record, kind uint64) []byte {
	family, protocol := uint64(familyIPv4), uint64(protocolUDP)
	if x.Client.Addr().Is6() {
		family = familyIPv6
	}
	if x.Transport == "tcp" {
		protocol = protocolTCP
	}
	asked := x.Time
	if x.Took != nil {
		asked = asked.Add(-time.Duration(*x.Took * float64(time.Second)))
	}
	b = appendVarint(b, messageType, kind)
	b = appendVarint(b, messageFamily, family)
	b = appendVarint(b, messageProtocol, protocol)
	b = appendAddress(b, messageQueryAddress, messageQueryPort, x.Client)
	b = appendAddress(b, messageResponseAddress, messageResponsePort, x.Local)
	b = appendTime(b, messageQuerySeconds, messageQueryNanos, asked)
	if kind == clientQuery {
		return appendBytes(b, messageQuery, x.Request)
	}
	b = appendTime(b, messageResponseSeconds, messageResponseNanos, x.Time)
	return appendBytes(b, messageResponse, x.Response)
}

func appendAddress(b []byte, address, port protowire.Number, value netip.AddrPort) []byte {
	if !value.IsValid() {
		return b
	}
	b = appendBytes(b, address, value.Addr().Unmap().AsSlice())
	return appendVarint(b, port, uint64(value.Port()))
}

func appendTime(b []byte, seconds, nanos protowire.Number, t time.Time) []byte {
	b = appendVarint(b, seconds, uint64(t.Unix())) //nolint:gosec // after 1970
	b = protowire.AppendTag(b, nanos, protowire.Fixed32Type)
	return protowire.AppendFixed32(b, uint32(t.Nanosecond())) //nolint:gosec // below 1e9
}

func appendVarint(b []byte, field protowire.Number, value uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), value)
}

func appendBytes(b []byte, field protowire.Number, value []byte) []byte {
	if len(value) == 0 {
		return b
	}
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), value)
}
