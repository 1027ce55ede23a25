package upstream

import (
	"log/slog"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// Config configures a Client. The zero Config is usable.
type Config struct {
	// Timeout is how long a query may take; zero means 4 s.
	Timeout time.Duration
	// Check checks a reply to a QUERY. It returns the response code with all twelve bits, and
	// whether the reply is a negative answer. A reply for which it returns an error is not used.
	// If Check is nil only headers are read.
	//
	// A caller that parses the answer parses a reply for the second time. That costs about 50 ns of the 17 µs of an
	// exchange. Check does not return the parsed reply, because the ID and the question of the reply are changed later.
	Check func(reply []byte) (rcode int, negative bool, err error)
	// TLSRootsFile is a PEM file with certificate authorities for TLS servers. It is read for every new
	// connection. If TLSRootsFile is empty, the authorities of the system are used.
	TLSRootsFile string
	// Control is called for each socket before the socket is connected, like the Control function of
	// a net.Dialer. It may be nil.
	Control func(network, address string, conn syscall.RawConn) error
	// Clock tells the age of sockets; nil means clock.New().
	Clock *clock.Clock
	// Logger logs when a server is down or loops, and when it can be used again; nil logs
	// nothing.
	Logger *slog.Logger
	// Observe is called with the time that each reply took, from several goroutines. It
	// must not block. It may be nil.
	Observe func(server Spec, rtt time.Duration)
}

// defaultTimeout is less than the 5 s after which glibc gives up on a nameserver.
const defaultTimeout = 4 * time.Second

// Options tell how to ask a group of servers, as in resolv.conf(5) or flags.
type Options struct {
	// Fastest prefers fast servers over servers that come first.
	Fastest bool
	// UseVC asks over TCP only.
	UseVC bool
	// Timeout and Attempts are options of resolv.conf(5). A query may take Timeout times Attempts times the number of
	// servers, but not longer than Config.Timeout. If only Timeout is zero, 5 s is used, and if only Attempts is zero,
	// 2: these are the defaults of resolv.conf(5). If both are zero, only Config.Timeout counts.
	Timeout  time.Duration
	Attempts int
}

// total returns how long a query may take according to resolv.conf(5). servers is the number of servers in the group.
// Zero means no bound.
func (o Options) total(servers int) time.Duration {
	const defaultTimeout, defaultAttempts = 5 * time.Second, 2
	if o.Timeout <= 0 && o.Attempts <= 0 {
		return 0
	}
	timeout, attempts := o.Timeout, o.Attempts
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	if attempts <= 0 {
		attempts = defaultAttempts
	}
	return timeout * time.Duration(attempts*servers)
}

// Status is the state of a server and what was counted for it.
type Status struct {
	Spec  Spec
	State State
	RTT   time.Duration // smoothed; zero before the first reply

	Requests  uint64 // queries sent, with repetitions and probes
	Failures  uint64 // queries without a reply: timeouts and errors
	Wrong     uint64 // responses that belong to no query in flight
	Malformed uint64 // packets that are not DNS responses, and replies that cannot be parsed
	Hedges    uint64 // queries sent because a server was late

	// Heard is when the last reply came, and Unanswered when the last [Client.Ask] ended without one; zero for never.
	Heard, Unanswered time.Time

	// Responses are replies to queries by response code: NOERROR, NXDOMAIN and SERVFAIL, and if they have come REFUSED,
	// and "other" for the rest, because there are 4,096 codes. Replies to probes do not count.
	Responses map[string]uint64
	// Refusing is true if all recent replies to queries were failures: at least ten in a row, for names of at least
	// three domains. A failure does not count if another server failed for the same query before, and that server
	// answers other queries: then the name is the likely reason.
	Refusing  bool
	RefusedAt time.Time // when the last failure came that counts for Refusing

	Looping     string // why State is Looping, or empty
	LastError   string // empty if there was none
	LastErrorAt time.Time
	Barred      bool // the last query could not be sent: a firewall of this host drops it (EPERM)

	// TCP has failures of queries over TCP, if the server is also queried over UDP.
	TCP TCPStatus
}

// A TCPStatus describes the last reply over TCP, and the failures of queries over TCP since then.
type TCPStatus struct {
	Heard       time.Time // when the last reply over TCP came; zero for never
	Since       time.Time
	LastError   string
	LastErrorAt time.Time
}
