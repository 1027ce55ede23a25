package seen

import (
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Record describes a query to people and programs.
type Record struct {
	Time       time.Time      `json:"time"`
	Client     netip.AddrPort `json:"client"`
	UID        *uint32        `json:"uid,omitempty"`
	Unit       string         `json:"unit,omitempty"`
	Cgroup     string         `json:"cgroup,omitempty"`
	Transport  string         `json:"transport"`
	Opcode     string         `json:"opcode,omitempty"` // if it is not QUERY
	Name       string         `json:"name"`
	Type       string         `json:"type"`
	Class      string         `json:"class,omitempty"` // if it is not IN
	Rcode      string         `json:"rcode"`
	Truncated  bool           `json:"truncated,omitempty"`
	Source     string         `json:"source"`
	Server     string         `json:"server,omitempty"`
	Age        int            `json:"ageSeconds,omitempty"`
	Expired    int            `json:"expiredSeconds,omitempty"`
	Reason     string         `json:"reason,omitempty"`
	Rows       []string       `json:"rows,omitempty"`
	Took       *float64       `json:"tookSeconds,omitempty"`
	Noteworthy bool           `json:"noteworthy"`

	// For readers of messages only: the address of the agent, the request, and the response, which is empty if there was none.
	Local             netip.AddrPort `json:"-"`
	Request, Response []byte         `json:"-"`
}

// Messages returns how many messages the record has.
func (r *Record) Messages() int { return messages(r.Response) }

// record returns the record of a query. path is the path of the client's cgroup.
func record(q *Query, path string) Record {
	r := Record{
		Time: q.Time.UTC(), Client: q.Client, Cgroup: path, Unit: UnitOf(path), Transport: "udp",
		Name: q.Name.String(), Type: wire.TypeName(q.Type), Rcode: wire.RcodeName(int(q.Rcode)), Truncated: q.Truncated,
		Source: q.Source, Server: q.Server, Age: int(max(q.Age, 0) / time.Second), Expired: int(max(q.Expired, 0) / time.Second),
		Reason: q.Reason, Rows: q.Rows, Noteworthy: q.Kind.noteworthy(), Request: q.Request, Response: q.Response,
	}
	if q.Rcode == Dropped {
		r.Rcode = droppedName
	}
	if q.Local != nil {
		r.Local = q.Local()
	}
	if q.TCP {
		r.Transport = "tcp"
	}
	if q.Class != dns.ClassINET {
		r.Class = dns.Class(q.Class).String()
	}
	if q.Who.Known {
		r.UID = &q.Who.UID
	}
	if q.Opcode != dns.OpcodeQuery {
		if r.Opcode = dns.OpcodeToString[int(q.Opcode)]; r.Opcode == "" {
			r.Opcode = "OPCODE" + strconv.Itoa(int(q.Opcode))
		}
	}
	if q.Took >= 0 {
		took := q.Took.Round(time.Microsecond).Seconds()
		r.Took = &took
	}
	return r
}

const droppedName = "DROPPED"

// Who returns a text about the client: its unit and its user, as far as they are known, otherwise its address. (For
// a client on this host, the address says nothing about the program.) A user may choose the name of a unit, so the
// result may have any characters.
func (r *Record) Who() string {
	uid := ""
	if r.UID != nil {
		uid = "uid " + strconv.FormatUint(uint64(*r.UID), 10)
	}
	switch {
	case r.Unit == "" && uid == "":
		return r.Client.Addr().String()
	case r.Unit == "":
		return uid
	case uid == "":
		return r.Unit
	}
	return r.Unit + " (" + uid + ")"
}

// Cause returns why the query has failed: the reason without what differs between queries with one cause, such as names
// and the error of each nameserver. A nameserver that has sent a failure is a part of the cause.
func (r *Record) Cause() string {
	cause, _, _ := strings.Cut(r.Reason, "; ")
	switch {
	case cause == "" && r.Server == "":
		return r.Rcode
	case cause == "":
		return r.Server + ": " + r.Rcode
	case r.Server == "" || !strings.HasPrefix(cause, r.Server+": "):
		cause, _, _ = strings.Cut(cause, ": ")
	}
	return cause
}

// Question returns the question as a text for people.
func (r *Record) Question() string {
	name := strings.TrimSuffix(r.Name, ".")
	if name == "" {
		name = "."
	}
	if r.Class != "" {
		name += " " + r.Class
	}
	if r.Opcode != "" {
		name = r.Opcode + " " + name
	}
	return name + " " + r.Type
}
