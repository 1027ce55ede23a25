package guard

import (
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

var connects = flag.Int("guard.connects", 10_000, "how often TestConnects looks a name up and connects to it")

// many is the number of names below the wildcard, more than keep their VIPs at a time.
const many = 6000

// server is the number of the server that a name leads to, and its address.
func server(name int) (number int, address string) {
	number = name % 8
	return number, fmt.Sprintf("198.51.100.%d", 1+number)
}

// TestConnects looks names up and connects to them at once, and checks that each attempt reaches the server of its name,
// which speaks first.
func TestConnects(t *testing.T) { // G4, G6
	w := newWorld(t)
	for number := range 8 {
		_, address := server(number)
		w.network.Exec("ip", "address", "add", address+"/32", "dev", "eth0")
		w.network.Serve(address+":443", func(conn *net.TCPConn) {
			_, _ = conn.Write([]byte{byte(number)})
			_, _ = io.Copy(io.Discard, conn)
		})
	}
	w.Exec("sysctl", "-q", "-w", "net.ipv4.ip_local_port_range=1024 65535")
	w.guard("allow:\n- names: ['*.many.example.com']\n")
	var next, reached atomic.Int64
	var failed sync.Map
	begun := time.Now()
	var workers sync.WaitGroup
	for range 16 {
		workers.Go(func() {
			w.Run(func() {
				queries, err := net.Dial("udp", gateway+":53")
				if err != nil {
					failed.Store(err.Error(), 1)
					return
				}
				defer queries.Close()
				for i := next.Add(1); i <= int64(*connects); i = next.Add(1) {
					if err := resolveAndConnect(queries, int(i)%many); err != nil {
						failed.Store(err.Error(), i)
						continue
					}
					reached.Add(1)
				}
			})
		})
	}
	workers.Wait()
	took := time.Since(begun)
	t.Logf("%d of %d attempts reached their server, %.0f a second", reached.Load(), *connects, float64(*connects)/took.Seconds())
	failed.Range(func(what, attempt any) bool {
		t.Errorf("attempt %v: %v", attempt, what)
		return true
	})
}

// resolveAndConnect looks a name up over a socket, connects to its VIP, and reads the number of the server.
func resolveAndConnect(queries net.Conn, name int) error {
	host := fmt.Sprintf("n%d.many.example.com.", name)
	query := new(dns.Msg).SetQuestion(host, dns.TypeA)
	reply, _, err := (&dns.Client{Timeout: time.Minute}).ExchangeWithConn(query, &dns.Conn{Conn: queries})
	if err != nil {
		return fmt.Errorf("query: %w", err)
	}
	if len(reply.Answer) != 1 {
		return fmt.Errorf("answer: %s with %d records", dns.RcodeToString[reply.Rcode], len(reply.Answer))
	}
	vip, err := netip.ParseAddr(reply.Answer[0].(*dns.A).A.String())
	if err != nil || !netip.MustParsePrefix("240.64.0.0/10").Contains(vip) {
		return fmt.Errorf("answer: %s is no VIP", vip)
	}
	conn, err := (&net.Dialer{Timeout: time.Minute, KeepAlive: -1}).Dial("tcp4", netip.AddrPortFrom(vip, 443).String())
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetLinger(0) // leaves no TIME-WAIT
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	greeting := make([]byte, 1)
	if _, err := io.ReadFull(conn, greeting); err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if number, _ := server(name); int(greeting[0]) != number {
		return fmt.Errorf("the server is %d, want %d", greeting[0], number)
	}
	return nil
}
