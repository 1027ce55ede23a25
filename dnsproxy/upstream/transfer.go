package upstream

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"time"

	"github.com/miekg/dns"
)

// maxTransfers is how many zone transfers may run at a time. Each has its own connection
// for as long as the client takes to read the transfer.
const maxTransfers = 16

// errTransfers is the error when too many zone transfers are running.
var errTransfers = errors.New("too many zone transfers are running")

// A transferRelay says where the messages of a transfer are sent, and how long the relay waits for one message.
type transferRelay struct {
	send    func(message []byte) error
	timeout time.Duration
}

// relayTransfer sends the query and relays the messages of the response. It does not relay the last message, but
// returns it.
func relayTransfer(conn net.Conn, query []byte, tracker *transferEnd, to transferRelay) (last []byte, err error) {
	if err := conn.SetDeadline(time.Now().Add(to.timeout)); err != nil {
		return nil, err
	}
	framed := binary.BigEndian.AppendUint16(nil, uint16(len(query))) //nolint:gosec // a message
	if _, err := conn.Write(append(framed, query...)); err != nil {
		return nil, err
	}
	for {
		if err := conn.SetDeadline(time.Now().Add(to.timeout)); err != nil {
			return nil, err
		}
		var frame [frameLen]byte
		if _, err := io.ReadFull(conn, frame[:]); err != nil {
			return nil, err
		}
		message := make([]byte, binary.BigEndian.Uint16(frame[:]))
		if _, err := io.ReadFull(conn, message); err != nil {
			return nil, err
		}
		ended, err := tracker.isLast(message)
		if err != nil || ended {
			return message, err
		}
		if err := to.send(message); err != nil {
			return nil, err
		}
	}
}

// A transferEnd finds the last message of a zone transfer. The records of a transfer begin and end with the zone's
// SOA record. If the transfer is incremental, the second record is the SOA record of an older version, and the
// zone's SOA record also stands before the additions of the last difference. So the zone's SOA record is sent three
// times.
type transferEnd struct {
	id           uint16
	incremental  bool   // the query is an IXFR
	clientSerial uint32 // the serial that the client has, if the query is an IXFR

	records  int    // how many were received so far
	serial   uint32 // the serial of the zone
	soaCount int    // how often the zone's SOA record was received so far
	soaTotal int    // how often the zone's SOA record is sent in the whole transfer
}

func newTransferEnd(query []byte) (*transferEnd, error) {
	msg := new(dns.Msg)
	if err := msg.Unpack(query); err != nil || len(msg.Question) != 1 {
		return nil, errMalformedQuery
	}
	t := &transferEnd{id: msg.Id, incremental: msg.Question[0].Qtype == dns.TypeIXFR, soaTotal: 2}
	for _, rr := range msg.Ns {
		if soa, ok := rr.(*dns.SOA); ok {
			t.clientSerial = soa.Serial
		}
	}
	return t, nil
}

// isLast reports whether a message is the last one of the transfer.
func (t *transferEnd) isLast(message []byte) (bool, error) {
	msg := new(dns.Msg)
	if err := msg.Unpack(message); err != nil || !msg.Response || msg.Id != t.id {
		return false, ErrMalformed
	}
	if msg.Rcode != dns.RcodeSuccess || len(msg.Answer) == 0 {
		return true, nil
	}
	for _, rr := range msg.Answer {
		t.records++
		soa, isSOA := rr.(*dns.SOA)
		switch {
		case t.records == 1 && !isSOA:
			return true, nil // not a transfer: the client decides what to do with it
		case t.records == 1:
			t.serial = soa.Serial
		case t.records == 2 && isSOA && t.incremental && soa.Serial != t.serial:
			t.soaTotal = 3
		}
		if isSOA && soa.Serial == t.serial {
			t.soaCount++
		}
	}
	// The client has the zone already if it has the zone's serial, or a later one (RFC 1982).
	upToDate := t.incremental && t.records == 1 && int32(t.serial-t.clientSerial) <= 0 //nolint:gosec // serials wrap around
	return t.soaCount >= t.soaTotal || upToDate, nil
}
