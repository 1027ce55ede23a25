package conntrack_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// BenchmarkDump lists 10 of 200,000 entries. Its processor time includes the kernel's.
func BenchmarkDump(b *testing.B) {
	netns.Need(b, "conntrack")
	ns := netns.New(b)
	var commands strings.Builder
	for i := range 200_000 {
		status := " -u ASSURED,SEEN_REPLY"
		if i%20_000 == 0 {
			status = "" // no reply
		}
		fmt.Fprintf(&commands, "-I -p tcp -s 10.%d.%d.1 -d 240.240.0.1 --sport %d --dport 443 --state ESTABLISHED -t 3600%s\n", i>>14, i>>6&255, 1024+i&63, status)
	}
	file := filepath.Join(b.TempDir(), "entries")
	if err := os.WriteFile(file, []byte(commands.String()), 0o600); err != nil {
		b.Fatal(err)
	}
	ns.Exec("conntrack", "-R", file)
	for name, filter := range map[string]conntrack.Filter{
		"port":     {Protocol: unix.IPPROTO_TCP, DestinationPort: 53},
		"protocol": {Protocol: unix.IPPROTO_TCP},
		"status":   {StatusMask: conntrack.SeenReply},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			before, found := processorTime(b), 0
			for b.Loop() {
				found = 0
				ns.Run(func() {
					if err := conntrack.Dump(unix.AF_INET, func(e conntrack.Entry) {
						if !e.Replied() {
							found++
						}
					}, filter); err != nil {
						b.Fatal(err)
					}
				})
			}
			b.ReportMetric(float64((processorTime(b)-before).Microseconds())/float64(b.N)/1000, "cpu-ms/op")
			b.ReportMetric(float64(found), "entries")
		})
	}
}

// processorTime returns the processor time that this process has used.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
