/* What nearly every program does with a name: getaddrinfo for both families. It
 * prints the first address. The benchmark compiles it with glibc and with musl. */
#include <netdb.h>
#include <stdio.h>
#include <sys/socket.h>

int main(int argc, char **argv)
{
	struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found;
	char text[64];
	int failed;

	if (argc != 2) {
		fprintf(stderr, "usage: getaddrinfo NAME\n");
		return 2;
	}
	failed = getaddrinfo(argv[1], NULL, &hints, &found);
	if (failed) {
		fprintf(stderr, "getaddrinfo: %s\n", gai_strerror(failed));
		return 1;
	}
	if (getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, NULL, 0, NI_NUMERICHOST))
		return 1;
	puts(text);
	freeaddrinfo(found);
	return 0;
}
