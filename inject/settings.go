package inject

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nametap/nametap/internal/settings"
)

// A kind returns an error unless a text is a value of a setting, as the agent reads it.
type kind func(value string) error

// settingKinds has the settings of `nametap agent` that Config.Settings may have, by the names of their flags. With any
// other setting or value, the agent would not start, and its pod would have no DNS.
var settingKinds = withNames(map[string]kind{ //nolint:gochecknoglobals // a constant
	"before-sync": oneOf("forward", "hold", "servfail"), "capture-servers": oneOf("all", "resolv-conf"), "log-format": oneOf("text", "json"),
	"query-log": oneOf("off", "failed", "all"), "upstream-order": oneOf("strict", "fastest"), "workload-cert": oneOf("auto", "on", "off"),
	"cache-size": isBytes, "egress-mark": isUint32, "log-level": isLevel, "dnstap": isReceiver, "ttl": isTTL,
	"capture-wait": isDuration, "drain": isDuration, "serve-stale": isDuration, "egress-idle-timeout": isTimeout, "upstream-timeout": isTimeout,
}, map[string]kind{
	"capture-enabled capture-fail-open capture-host-network capture-resolved dns-auto-allocate egress xds-plaintext": isBool,
	"bypass ca-addr capture-exclude-cidr capture-exclude-gid capture-exclude-interface capture-exclude-uid " +
		"capture-virtual-interface config dns-addr egress-addr egress-proxy egress-source instance-ip labels-file local-only mesh-config namespace " +
		"pod-name resolv-conf service-account state-dir trust-domain upstream-root-ca xds-cert xds-key xds-root-ca xds-server-name " +
		"xds-token-file": func(string) error { return nil },
})

// withNames adds to kinds those of each list of names.
func withNames(kinds, lists map[string]kind) map[string]kind {
	for names, k := range lists {
		for name := range strings.FieldsSeq(names) {
			kinds[name] = k
		}
	}
	return kinds
}

func oneOf(values ...string) kind {
	return func(value string) error { return settings.OneOf(new(string), values...).Set(value) }
}

func isBytes(value string) error { return settings.Bytes(new(int), settings.ZeroIsNone).Set(value) }

func isUint32(value string) error { return settings.Uint(new(uint32)).Set(value) }

func isDuration(value string) error {
	return settings.Duration(new(time.Duration), settings.ZeroIsZero).Set(value)
}

func isTimeout(value string) error {
	return settings.Duration(new(time.Duration), settings.ZeroRefused).Set(value)
}

func isLevel(value string) error {
	return settings.LogLevel{LevelVar: new(slog.LevelVar)}.UnmarshalText([]byte(value))
}

func isBool(value string) error {
	if _, err := strconv.ParseBool(value); err != nil {
		return errors.New("want true or false")
	}
	return nil
}

// maxTTL is the longest TTL of DNS (RFC 2181, section 8).
const maxTTL = math.MaxInt32 * time.Second

func isTTL(value string) error {
	var ttl time.Duration
	err := settings.Duration(&ttl, settings.ZeroIsZero).Set(value)
	if err == nil && (ttl < time.Second || ttl > maxTTL) {
		err = fmt.Errorf("want 1s to %s", maxTTL)
	}
	return err
}

// receiver is the form of a receiver of dnstap.
var receiver = regexp.MustCompile(`^(|unix:///[!-~]{1,106}|tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))$`)

func isReceiver(value string) error {
	if !receiver.MatchString(value) {
		return errors.New("want unix:///PATH or tcp://HOST:PORT")
	}
	return nil
}

// reserved has the settings that Config.Settings must not have, because they follow from other fields or from the pod.
// The value of a setting says what it follows from.
var reserved = map[string]string{ //nolint:gochecknoglobals // a constant
	"xds-addr": "controlPlane", "cluster-id": "clusterID", "domain": "clusterDomain", "guard": "guard", "upstream": "nameservers",
	"status-addr": "whether Istio's sidecar is in the pod", "capture": "mode", "supervise": "mode",
	"capture-agent-uid": "the user of the agent in a pod", "capture-agent-gid": "the group of the agent in a pod",
}

// checkSettings returns an error with a line for each setting that the agent would refuse.
func checkSettings(values map[string]string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(values)) {
		isKind, known := settingKinds[name]
		origin := reserved[name]
		switch {
		case origin != "":
			errs = append(errs, fmt.Errorf("settings: %.100q cannot be set here, because it follows from: %s", name, origin))
		case !known:
			errs = append(errs, fmt.Errorf("settings: %.100q: want the name of a flag of `nametap agent`, without --", name))
		default:
			if err := isKind(values[name]); err != nil {
				errs = append(errs, fmt.Errorf("settings: %s: %.100q: %w", name, values[name], err))
			}
		}
	}
	return errors.Join(errs...)
}

// variable returns the environment variable of a setting.
func variable(setting string) string {
	return settings.Prefix + strings.ToUpper(strings.ReplaceAll(setting, "-", "_"))
}
