package dnsproxy

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
)

// A connection ends after the idle timeout from its last answer, and when the client takes no part of an answer for the write
// timeout. One with a reserved descriptor ends after 1 s, or its first answer.
func TestConnectionTimeouts(t *testing.T) { // A12
	const moment = time.Second
	if productTimeouts.idle != 10*time.Second || productTimeouts.write != 10*time.Second {
		t.Errorf("timeouts %+v", productTimeouts)
	}
	idle, write := tcpTimeouts.idle, tcpTimeouts.write
	for name, c := range map[string]struct {
		brief           bool
		ask, reads, end time.Duration // when the client sends a query (0 for never), reads the answer, and the connection ends
	}{
		"silent":       {false, 0, 0, idle},
		"asks":         {false, 3 * moment, 7 * moment, 7*moment + idle},
		"reads late":   {false, moment, moment + write + 1, moment + write + 1},
		"reads slowly": {false, moment, write, write + idle},
		"brief":        {true, 0, 0, time.Second},
		"brief, asks":  {true, moment / 2, moment / 2, moment / 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, Config{}, nil)
			w.loadServer(t, map[string]*api.NameTable_NameInfo{"web.example": {Ips: []string{"10.0.0.1"}}})
			limit := newLimit(1, slog.New(slog.DiscardHandler))
			defer limit.Close()
			conn, client := net.Pipe()
			served := &tcpConn{
				handler: &w.server.handler, listener: &tcpListener{handler: &w.server.handler, stopped: make(chan struct{})},
				from: arrival{protocol: overTCP, client: noClient, local: noClient}, conn: conn, task: newTask(),
				place: limit.Enter(conn), brief: c.brief, reader: bufio.NewReader(conn),
			}
			began := time.Now()
			go served.serve()
			if c.ask > 0 {
				packet, err := new(dns.Msg).SetQuestion("web.example.", dns.TypeA).Pack()
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(c.ask) //nolint:forbidigo // synctest advances the time
				if _, err := client.Write(framed(packet)); err != nil {
					t.Fatal(err)
				}
				time.Sleep(c.reads - c.ask) //nolint:forbidigo // as above
				length := make([]byte, lengthLen)
				if _, err := io.ReadFull(client, length); (err == nil) != (c.reads-c.ask < write) {
					t.Errorf("%s: %v", name, err)
				} else if err == nil {
					if _, err := io.CopyN(io.Discard, client, int64(binary.BigEndian.Uint16(length))); err != nil {
						t.Errorf("%s: %v", name, err)
					}
				}
			}
			if n, err := client.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || time.Since(began) != c.end {
				t.Errorf("%s: %d bytes, %v after %v, want the end after %v", name, n, err, time.Since(began), c.end)
			}
		})
	}
}
