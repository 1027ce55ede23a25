package test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// R21: while all nameservers are dead, a minute of the log has at most three lines, however many domains clients ask for.
func TestLinesOfDeadNameservers(t *testing.T) {
	t.Parallel()
	e := &examined{vm: newVM(t, "nft")}
	e.named.Handle(fakedns.Silence)
	e.other.Handle(fakedns.Silence)
	e.replace("resolv.conf", "nameserver "+named+"\nnameserver "+other+"\n")
	a := e.start()
	wait.Until(t, "the agent is ready", func() bool { return a.log.Count("msg=ready") > 0 })
	before := a.log.String()
	e.asks(10, dnsAddr, func(i int) string { return fmt.Sprintf("www.example%d.org.", i%100) })
	time.Sleep(time.Minute) //nolint:forbidigo // the minute of the test
	if lines := strings.TrimPrefix(a.log.String(), before); strings.Count(lines, "\n") > 3 || !strings.Contains(lines, "count=") {
		t.Errorf("the log has\n%s", lines)
	}
}
